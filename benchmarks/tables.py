"""Write the tables and the chart of README and docs from the files in benchmarks/results.

    python -m benchmarks.tables [--check]

With --check nothing is written; the exit code is 1 if a table or the chart is out of date.
"""

from benchmarks import accuracy_tables, capture_tables, search_tables, speed_tables, stage_tables
from benchmarks.publish import ROOT

import re
import sys
from typing import Annotated

import typer

CHART = ROOT / "docs" / "figures" / "speed.svg"

# Page and name of each table, which stands between <!-- NAME --> and <!-- end -->.
TABLES = (
    ("README.md", "front page claims", accuracy_tables.front_page_claims),
    ("README.md", "front page table", accuracy_tables.front_page_table),
    ("docs/benchmarks/accuracy.md", "real table", accuracy_tables.real_table),
    ("docs/benchmarks/accuracy.md", "seeds table", accuracy_tables.seeds_table),
    ("docs/benchmarks/accuracy.md", "classifier table", accuracy_tables.classifier_table),
    ("docs/benchmarks/accuracy.md", "worst sites table", accuracy_tables.worst_sites_table),
    ("docs/benchmarks/accuracy.md", "demo table", accuracy_tables.demo_table),
    ("docs/benchmarks/accuracy.md", "sides table", accuracy_tables.sides_table),
    ("docs/benchmarks/paper-tables.md", "paper tables", accuracy_tables.paper_tables),
    ("docs/benchmarks/paper-tables.md", "classifier paper tables", accuracy_tables.classifier_paper_tables),
    ("docs/benchmarks/paper-tables.md", "published table", accuracy_tables.published_table),
    ("docs/benchmarks/released-code.md", "golden table", accuracy_tables.golden_table),
    ("docs/benchmarks/released-code.md", "released table", accuracy_tables.released_table),
    ("docs/benchmarks/stages.md", "stages table", stage_tables.stages_table),
    ("docs/benchmarks/stages.md", "steps table", stage_tables.steps_table),
    ("docs/benchmarks/stages.md", "mixed table", stage_tables.mixed_table),
    ("docs/benchmarks/stages.md", "blocks table", stage_tables.blocks_table),
    ("docs/benchmarks/stages.md", "earlier stages table", stage_tables.earlier_stages_table),
    ("docs/benchmarks/stages.md", "reconstruct table", stage_tables.reconstruct_table),
    ("docs/benchmarks/stages.md", "drop table", stage_tables.drop_table),
    ("docs/benchmarks/stages.md", "brecq table", stage_tables.brecq_table),
    ("docs/benchmarks/stages.md", "table four", stage_tables.table_four),
    ("docs/benchmarks/stages.md", "table D", stage_tables.table_d),
    ("docs/benchmarks/budgets.md", "budgets table", stage_tables.budgets_table),
    ("docs/benchmarks/search.md", "speed-up table", search_tables.speed_up_table),
    ("docs/benchmarks/search.md", "whole models table", search_tables.whole_models_table),
    ("docs/benchmarks/search.md", "counts table", search_tables.counts_table),
    ("docs/benchmarks/search.md", "ablation table", search_tables.ablation_table),
    ("docs/benchmarks/search.md", "folds table", search_tables.folds_table),
    ("docs/benchmarks/search.md", "large table", search_tables.large_table),
    ("docs/benchmarks/speed.md", "speed table", speed_tables.speed_table),
    ("docs/benchmarks/speed.md", "accuracy table", speed_tables.accuracy_table),
    ("docs/benchmarks/speed.md", "runtime table", speed_tables.runtime_table),
    ("docs/benchmarks/speed.md", "limits table", speed_tables.limits_table),
    ("docs/benchmarks/speed.md", "arm table", speed_tables.arm_table),
    ("docs/benchmarks/speed.md", "load table", speed_tables.load_table),
    ("docs/benchmarks/speed.md", "throughput table", speed_tables.throughput_table),
    ("docs/benchmarks/speed.md", "ranks table", speed_tables.ranks_table),
    ("docs/how-to/run-on-a-gpu.md", "gpu table", speed_tables.gpu_table),
    ("docs/how-to/run-in-the-browser.md", "web table", speed_tables.web_table),
    ("docs/how-to/run-in-the-browser.md", "page table", speed_tables.page_table),
    ("docs/how-to/run-on-a-phone.md", "engines table", accuracy_tables.engines_table),
    ("docs/how-to/run-on-a-phone.md", "executorch table", speed_tables.executorch_table),
    ("docs/benchmarks/executors.md", "executors table", speed_tables.executors_table),
    ("docs/benchmarks/exports.md", "export table", speed_tables.export_table),
    ("docs/benchmarks/cost.md", "cost table", search_tables.cost_table),
    ("docs/reference/captured.md", "sweep table", capture_tables.sweep_table),
    ("docs/benchmarks/detection.md", "detector table", accuracy_tables.detector_table),
)


def main(check: Annotated[bool, typer.Option("--check")] = False) -> None:
    stale = []
    for place, name, table in TABLES:
        path = ROOT / place
        text = path.read_text(encoding="utf-8")
        begin, end = f"<!-- {name} -->", "<!-- end -->"
        if text.count(begin) != 1:
            sys.exit(f"{place} has {text.count(begin)} markers {begin}: it needs exactly one")
        block = f"{begin}\n{table()}\n{end}"
        fresh = re.sub(f"{begin}.*?{end}", lambda _, block=block: block, text, flags=re.DOTALL)
        if fresh != text:
            stale.append(f"{place}: {name}")
            if not check:
                path.write_text(fresh, encoding="utf-8")
    chart = speed_tables.speed_chart()
    if not CHART.exists() or CHART.read_text(encoding="utf-8") != chart:
        stale.append(str(CHART.relative_to(ROOT)))
        if not check:
            CHART.write_text(chart, encoding="utf-8")
    if check and stale:
        sys.exit("out of date, run `python -m benchmarks.tables`:\n" + "\n".join(stale))


if __name__ == "__main__":
    typer.run(main)
