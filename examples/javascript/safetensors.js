// The safetensors format: named arrays and notes in one flat file, as device_sdk writes it.

const CODES = {
  float64: "F64", float32: "F32", float16: "F16", int64: "I64", int32: "I32",
  int16: "I16", int8: "I8", uint16: "U16", uint8: "U8", bool: "BOOL",
};

/** An array's dtype, by ONNX Runtime's names, and the class that holds its elements. */
export const ARRAYS = {
  float64: Float64Array, float32: Float32Array, float16: globalThis.Float16Array ?? Uint16Array,
  int64: BigInt64Array, int32: Int32Array, int16: Int16Array, int8: Int8Array,
  uint16: Uint16Array, uint8: Uint8Array, bool: Uint8Array,
};

/** How many elements an array of this shape has. */
export const count = (dims) => dims.reduce((product, size) => product * size, 1);

/** A file's bytes. `tensors`: [name, {type, dims, data}] pairs, in the order of the file. */
export function encode(tensors, notes = {}) {
  const entries = [["__metadata__", notes]];
  const parts = [];
  let end = 0;
  for (const [name, { type, dims, data }] of tensors) {
    const offsets = [end, end += data.byteLength];
    entries.push([name, { dtype: CODES[type], shape: dims, data_offsets: offsets }]);
    parts.push(new Uint8Array(data.buffer, data.byteOffset, data.byteLength));
  }
  // By hand: an object would put names that are numbers first.
  const pairs = entries.map((pair) => pair.map((each) => JSON.stringify(each)).join(":"));
  const text = new TextEncoder().encode(`{${pairs.join(",")}}`);
  const start = 8 + Math.ceil(text.length / 8) * 8; // so that the data is aligned
  const file = new Uint8Array(start + end).fill(0x20, 8, start);
  new DataView(file.buffer).setBigUint64(0, BigInt(start - 8), true);
  file.set(text, 8);
  let place = start;
  for (const part of parts) {
    file.set(part, place);
    place += part.length;
  }
  return file;
}

/** A file's `tensors` (a Map of names to {type, dims, data}, copies) and `notes`. */
export function decode(file) {
  const refuse = (problem) => { throw new Error(`no safetensors file, or damaged: ${problem}`); };
  if (file.length < 8) refuse("cut off before the header");
  const view = new DataView(file.buffer, file.byteOffset, file.byteLength);
  const start = 8 + Number(view.getBigUint64(0, true));
  if (start > file.length) refuse("cut off inside the header");
  let header;
  try {
    header = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(file.subarray(8, start)));
  } catch (error) {
    refuse(`its header: ${error.message}`);
  }
  if (!(header instanceof Object)) refuse("its header is no object");
  const { __metadata__: notes, ...entries } = header;
  const types = Object.fromEntries(Object.entries(CODES).map(([type, code]) => [code, type]));
  const tensors = new Map();
  const spans = [];
  const isSize = (size) => Number.isSafeInteger(size) && size >= 0;
  const sizes = (list) => Array.isArray(list) && list.every(isSize);
  for (const [name, entry] of Object.entries(entries)) {
    const { dtype, shape, data_offsets: offsets } = entry ?? {};
    const Elements = ARRAYS[types[dtype]];
    if (!Elements) refuse(`'${name}' is of the dtype ${dtype}`);
    if (!sizes(shape) || !sizes(offsets)) refuse(`'${name}' has no shape and place`);
    const [begin, end] = offsets.map((offset) => start + offset);
    if (end > file.length || end - begin !== count(shape) * Elements.BYTES_PER_ELEMENT) {
      refuse(`the offsets of '${name}' match neither its shape nor the file`);
    }
    spans.push([begin, end]);
    const data = new Elements(new Uint8Array(file.subarray(begin, end)).buffer);
    tensors.set(name, { type: types[dtype], dims: shape, data });
  }
  spans.sort((one, other) => one[0] - other[0] || one[1] - other[1]);
  const filled = spans.reduce((place, [begin, end]) => (begin === place ? end : NaN), start);
  if (filled !== file.length) refuse("its tensors overlap or leave gaps");
  return { tensors, notes: notes ?? {} };
}
