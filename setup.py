"""Compile the files of the library at the same time; everything else about the package is in pyproject.toml."""

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

from setuptools import setup
from setuptools.command.build_ext import build_ext


class ParallelBuild(build_ext):
    def build_extensions(self):
        compile_in_turn = self.compiler.compile

        def compile_together(sources, **options):
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = pool.map(lambda source: compile_in_turn([source], **options), sources)
                return list(chain.from_iterable(objects))

        self.compiler.compile = compile_together
        super().build_extensions()


setup(cmdclass={"build_ext": ParallelBuild})
