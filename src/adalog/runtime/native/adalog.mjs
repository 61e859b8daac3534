// Run packs, which `adalog pack` writes, in a browser or in Node.js: quantized models without a server.
//
//     import { load } from "./adalog.mjs";
//     const model = await load("model.adalog");
//     const logits = model.run(image); // Float32Array: one or more prepared images, channels first
//     model.close();
//
// `adalog.wasm`, the library of adalog.h, must lie beside this file. docs/how-to/run-in-the-browser.md has the steps.
//
// A pack may be hostile: it is either refused, or it runs within a memory of its own. Each model has an instance of the
// module, so no model can read the memory of another.

const ARRAYS = [Float32Array, Float64Array, Uint8Array, Int32Array, BigInt64Array, Uint8Array];
const TYPES = ["float32", "float64", "uint8", "int32", "int64", "bool"]; // in the order of adalog_type

let compiled; // a promise of the module, which all models share

async function read(source) {
  if (source instanceof ArrayBuffer || ArrayBuffer.isView(source)) return source;
  if (typeof Blob !== "undefined" && source instanceof Blob) return source.arrayBuffer();
  const url = new URL(source, globalThis.location?.href ?? `file://${globalThis.process?.cwd()}/`);
  if (url.protocol === "file:" && globalThis.process?.versions?.node)
    return (await import("node:fs/promises")).readFile(url);
  const response = await fetch(url);
  if (!response.ok) throw new Error(`${url} cannot be read: the server answers ${response.status}`);
  return response.arrayBuffer();
}

async function compile() {
  return WebAssembly.compile(await read(new URL("adalog.wasm", import.meta.url)));
}

// The memory of an instance, by the layout that C has in 32 bits. Memory that grows gets a new buffer: keep no view.
class Memory {
  constructor(wasm) {
    this.wasm = wasm;
  }
  get buffer() {
    return this.wasm.memory.buffer;
  }
  take(bytes) {
    const at = this.wasm.malloc(Math.max(bytes, 1)) >>> 0;
    if (!at) throw new Error(`there is not enough memory for ${bytes} bytes`);
    return at;
  }
  // Copies an array. The caller frees it.
  put(array) {
    const at = this.take(array.byteLength);
    new Uint8Array(this.buffer, at).set(new Uint8Array(array.buffer ?? array, array.byteOffset ?? 0, array.byteLength));
    return at;
  }
  int(at) {
    return new DataView(this.buffer).getInt32(at, true);
  }
  address(at) {
    return new DataView(this.buffer).getUint32(at, true);
  }
  whole(at) {
    return Number(new DataView(this.buffer).getBigInt64(at, true));
  }
  doubles(at, count) {
    return Array.from(new Float64Array(this.buffer, at, count));
  }
  text(at) {
    const bytes = new Uint8Array(this.buffer, at);
    return new TextDecoder().decode(bytes.subarray(0, bytes.indexOf(0)));
  }
  list(at, count, size, item) {
    return Array.from({ length: count }, (_, i) => item(at + i * size));
  }
}

function value(memory, at) {
  const shape = memory.address(at + 12);
  return {
    name: memory.text(memory.address(at)),
    type: TYPES[memory.int(at + 4)],
    shape: memory.list(shape, memory.int(at + 8), 8, (each) => memory.whole(each)),
  };
}

function preprocessing(memory, at) {
  const [height, width, resizeHeight, resizeWidth, resizeShorter] = memory.list(at, 5, 4, (each) => memory.int(each));
  const words = memory.list(at + 20, 4, 4, (each) => memory.text(memory.address(each)));
  const [interpolation, fit, position, channels] = words;
  return {
    ...{ height, width, resizeHeight, resizeWidth, resizeShorter, interpolation, fit, position, channels },
    fill: memory.int(at + 36) ? memory.doubles(at + 40, 3) : null,
    mean: memory.doubles(at + 64, 3),
    std: memory.doubles(at + 88, 3),
    rescale: memory.doubles(at + 112, 1)[0],
  };
}

class Model {
  #memory;
  #handle;

  // Use `load`.
  constructor(wasm, pack, options) {
    const memory = new Memory(wasm);
    this.#memory = memory;
    const bytes = memory.put(pack);
    const level = options.level === undefined ? 0 : memory.put(new TextEncoder().encode(`${options.level}\0`));
    const settings = memory.put(Uint32Array.of(1, level, Math.min(options.memory ?? 0, 2 ** 32 - 1)));
    const handle = memory.take(4);
    this.#call((error) => wasm.adalog_model_open_memory(bytes, pack.byteLength, settings, handle, error));
    this.#handle = memory.address(handle);
    for (const at of [bytes, level, settings, handle]) wasm.free(at);
    this.#describe(wasm.adalog_model_describe(this.#handle));
  }

  // The values that a model takes and returns, for one image: { name, type, shape }.
  // classes: their names, or null. preprocessing: the fields of adalog_preprocessing, or null. bits: such as "w4a4".
  // level: the kernels in use, "scalar" or "wasm". memory: bytes that the model takes.
  #describe(at) {
    const memory = this.#memory;
    const fields = memory.list(at, 13, 4, (each) => memory.address(each));
    this.inputs = memory.list(fields[0], fields[1], 20, (each) => value(memory, each));
    this.outputs = memory.list(fields[2], fields[3], 20, (each) => value(memory, each));
    this.batches = memory.list(fields[4], fields[5], 8, (each) => memory.whole(each));
    this.preprocessing = fields[6] ? preprocessing(memory, fields[6]) : null;
    this.classes = fields[7] ? memory.list(fields[7], fields[8], 4, (each) => memory.text(memory.address(each))) : null;
    this.bits = memory.text(fields[9]);
    this.level = memory.text(fields[10]);
    this.memory = fields[12];
    Object.freeze(this);
  }

  // Calls a function of the library with the place of an error, which it throws.
  #call(run) {
    const memory = this.#memory;
    const error = memory.take(260);
    let status;
    try {
      status = run(error);
    } catch (cause) {
      this.#memory = null; // a call that stopped half way may have left anything behind
      throw new Error(`the library stopped: ${cause.message}`, { cause });
    }
    const message = status ? memory.text(error + 4) : "";
    memory.wasm.free(error);
    if (status) throw new Error(message);
  }

  // Computes the outputs of some images. images: a Float32Array with the values of all images, or one array for each
  // input of the model. Returns a typed array, or one for each output if the model has several.
  run(images) {
    const memory = this.#memory;
    if (!memory) throw new Error("the model is closed");
    const given = images instanceof Float32Array ? [images] : images;
    if (!Array.isArray(given) || !given.every((each) => each instanceof Float32Array))
      throw new TypeError("the images are neither a Float32Array nor a list of them, one for each input");
    const size = ({ shape }) => shape.reduce((product, side) => product * side, 1);
    const count = Math.ceil((given[0]?.length ?? 0) / Math.max(this.inputs[0] ? size(this.inputs[0]) : 1, 1));
    const taken = [];
    const buffers = (places) => {
      taken.push(memory.put(Uint32Array.from(places.flat())));
      return taken.at(-1);
    };
    const take = (bytes, array) => {
      taken.push(array ? memory.put(array) : memory.take(bytes));
      return [taken.at(-1), bytes];
    };
    try {
      const outputs = this.outputs.map((output) => {
        const kind = ARRAYS[TYPES.indexOf(output.type)];
        return [kind, ...take(size(output) * count * kind.BYTES_PER_ELEMENT)];
      });
      const from = buffers(given.map((each) => take(each.byteLength, each)));
      const to = buffers(outputs.map((each) => each.slice(1)));
      this.#call((error) =>
        memory.wasm.adalog_model_run(this.#handle, BigInt(count), from, given.length, to, outputs.length, error),
      );
      const results = outputs.map(([kind, at, bytes]) => new kind(memory.buffer.slice(at, at + bytes)));
      return results.length === 1 ? results[0] : results;
    } finally {
      if (this.#memory) for (const at of taken) memory.wasm.free(at);
    }
  }

  // Frees the model. Without this call, it is freed once nothing refers to it.
  close() {
    this.#memory = null;
  }
}

// Opens a pack. source: the bytes (ArrayBuffer, typed array or Blob), or the address of the file. options.level: the
// kernels, "scalar" or "wasm"; default "wasm". options.memory: limit on the bytes of the open model; default 2 GiB.
export async function load(source, options = {}) {
  if (options.memory !== undefined && !(options.memory >= 1))
    throw new Error(`options.memory = ${options.memory}: give a number of bytes of at least 1, or leave it out`);
  const pack = await read(source);
  compiled ??= compile();
  compiled.catch(() => (compiled = undefined)); // the next call tries again
  const stop = (status) => {
    throw new Error(`it exits with ${status}`);
  };
  const imports = { env: { emscripten_notify_memory_growth() {} }, wasi_snapshot_preview1: { proc_exit: stop } };
  const wasm = (await WebAssembly.instantiate(await compiled, imports)).exports;
  wasm._initialize();
  return new Model(wasm, pack, options);
}
