// The worker: it opens packs and classifies pictures, one after the other.
import { load } from "./adalog.mjs";
import { isPack } from "./files.mjs";
import { prepare } from "./prepare.mjs";

let model = null;

async function open(file) {
  const opened = await load(file);
  const [input, output] = [opened.inputs[0]?.shape, opened.outputs[0]?.shape];
  if (opened.inputs.length !== 1 || opened.outputs.length !== 1 || input.length !== 3 || output.length !== 1)
    throw new Error("this model is not a classifier of pictures");
  if (!opened.preprocessing) throw new Error("this pack does not say how to prepare a picture");
  const { width, height } = opened.preprocessing;
  if (`${input}` !== `3,${height},${width}`)
    throw new Error("this pack prepares pictures of another size than its model takes");
  model?.close();
  model = opened;
  const megabytes = (file.size / 1e6).toFixed(1);
  const name = file.name ?? "model.adalog";
  return { model: `${name}: ${megabytes} MB, ${model.bits}, ${model.level} kernels. Drop a picture.` };
}

async function classify(file) {
  if (!model) throw new Error("there is no model yet: drop a pack first");
  const picture = await createImageBitmap(file, { colorSpaceConversion: "none" });
  const image = prepare(picture, model.preprocessing);
  const begin = performance.now();
  const logits = model.run(image);
  const milliseconds = performance.now() - begin;
  const most = Math.max(...logits);
  const powers = Array.from(logits, (logit) => Math.exp(logit - most));
  const total = powers.reduce((sum, power) => sum + power, 0);
  const classes = powers
    .map((power, number) => ({ name: model.classes?.[number] ?? `class ${number}`, probability: power / total }))
    .sort((one, other) => other.probability - one.probability)
    .slice(0, 5);
  return { classes, milliseconds };
}

async function answer(work) {
  try {
    postMessage(await work());
  } catch (error) {
    postMessage({ error: `${error.message}` });
  }
}

let queue = answer(async () => {
  const response = await fetch("model.adalog");
  if (!response.ok) return { model: "There is no model.adalog beside this page: drop a pack." };
  return open(await response.blob());
});
onmessage = ({ data }) => {
  queue = queue.then(() => answer(async () => ((await isPack(data)) ? open(data) : classify(data))));
};
