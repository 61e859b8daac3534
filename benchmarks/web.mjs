// Times models on one image in Node.js, for benchmarks/web.py.
//
//     node web.mjs ADALOG ORT CALLS < WAYS
//
// ADALOG: the file adalog.mjs. ORT: the folder of the package onnxruntime-web. WAYS: a JSON list of { name, file, level,
// shape }; level is null for an ONNX file. The ways take turns. Prints, for each name, the milliseconds of every call.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [adalog, ort, calls] = process.argv.slice(2);
const { load } = await import(pathToFileURL(adalog));
const { InferenceSession, Tensor, env } = await import(pathToFileURL(`${ort}/dist/ort.wasm.min.mjs`));
env.wasm.numThreads = 1;

async function runner({ file, level, shape }) {
  const image = Float32Array.from({ length: shape.reduce((product, side) => product * side, 1) }, Math.random);
  if (level) {
    const model = await load(file, { level });
    return () => model.run(image);
  }
  const session = await InferenceSession.create(readFileSync(file), { executionProviders: ["wasm"] });
  return () => session.run({ [session.inputNames[0]]: new Tensor("float32", image, [1, ...shape]) });
}

const ways = JSON.parse(readFileSync(0));
for (const way of ways) Object.assign(way, { run: await runner(way), times: [] });
for (let i = -1; i < calls; i++)
  for (const { run, times } of ways) {
    const begin = performance.now();
    await run();
    if (i >= 0) times.push(performance.now() - begin); // the first call compiles
  }
console.log(JSON.stringify(Object.fromEntries(ways.map(({ name, times }) => [name, times]))));
