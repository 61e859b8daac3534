// Runs packs by the module for browsers, for tests/test_web.py.
//
//     node web.mjs BUILT run PACK LEVEL < images > outputs    runs all images in one call
//     node web.mjs BUILT describe PACK LEVEL                  prints the description as JSON
//     node web.mjs BUILT open MEMORY < packs                  opens and runs many packs, as tests/pack.c does
//     node web.mjs BUILT prepare PACK WIDTH HEIGHT < picture > image    prepares a picture, given as RGBA bytes
//
// The form with `open` prints a line for each pack: the message of its error, or nothing. BUILT: the folder of the module.
import { readFileSync, writeFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [folder, command, ...rest] = process.argv.slice(2);
const { load } = await import(pathToFileURL(`${folder}/adalog.mjs`));
const count = (shape) => shape.reduce((product, side) => product * side, 1);

if (command === "run") {
  const model = await load(rest[0], { level: rest[1] });
  const given = readFileSync(0);
  const outputs = model.run(new Float32Array(given.buffer.slice(given.byteOffset, given.byteOffset + given.length)));
  writeFileSync(1, new Uint8Array(outputs.buffer));
  model.close();
} else if (command === "describe") {
  console.log(JSON.stringify(await load(readFileSync(rest[0]), { level: rest[1] })));
} else if (command === "prepare") {
  const model = await load(rest[0]);
  const [width, height] = [Number(rest[1]), Number(rest[2])];
  const data = readFileSync(0);
  globalThis.OffscreenCanvas = class {
    getContext = () => ({ fillRect() {}, drawImage() {}, getImageData: () => ({ data }) });
  };
  const { prepare } = await import(new URL("../examples/web/prepare.mjs", import.meta.url));
  writeFileSync(1, new Uint8Array(prepare({ width, height }, model.preprocessing).buffer));
} else {
  const packs = readFileSync(0);
  for (let at = 0; at < packs.length; ) {
    const size = Number(packs.readBigInt64LE(at));
    const pack = packs.subarray(at + 8, at + 8 + size);
    at += 8 + size;
    let line = "";
    try {
      const model = await load(pack, { memory: Number(rest[0]) });
      model.run(model.inputs.map(({ shape }) => new Float32Array(3 * count(shape)).fill(1)));
      model.close();
    } catch (error) {
      line = error.message;
    }
    console.log(line);
  }
}
