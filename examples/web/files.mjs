// A pack is a safetensors file: the length of its table in eight bytes, then a JSON object.
export async function isPack(file) {
  const start = new Uint8Array(await file.slice(0, 9).arrayBuffer());
  return start.length === 9 && start[8] === "{".charCodeAt(0);
}
