// An artifact's state: named tensors, which files put in and take out.

import { fit, isAxis, resolve, TrainerError } from "./fit.js";
import { ARRAYS, count, decode, encode } from "./safetensors.js";

const CHECKPOINT = "tessera-checkpoint-1";
const BLANK = "0".repeat(64);

export async function sha256(bytes) {
  if (!globalThis.crypto?.subtle) {
    throw new TrainerError("no crypto.subtle here: it takes https, localhost, or Node 20");
  }
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  return Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export class State {
  tensors = new Map();
  sizes = {}; // of the axes that the state has
  #id;
  #ports;
  #members; // by torch's names
  #missing; // parameters and buffers without a value
  #Tensor;

  /** All zero, at the example's sizes. `Tensor`: ONNX Runtime's. */
  constructor(manifest, id, Tensor) {
    this.#id = id;
    this.#Tensor = Tensor;
    this.#ports = new Map(manifest.state.map((port) => [port.name, port]));
    this.#members = new Map(manifest.state.flatMap((port) => (port.members ?? [])
      .map((member) => [member.name, { ...member, dtype: port.dtype, holder: port.name }])));
    this.#missing = new Set(this.#members.keys());
    for (const axis of manifest.state.flatMap(({ shape }) => shape).filter(isAxis)) {
      this.sizes[axis] = manifest.axes[axis].example;
    }
    for (const port of manifest.state) this.tensors.set(port.name, this.#zeros(port, this.sizes));
  }

  /** Finished steps. */
  get steps() { return this.tensors.get("step").data[0]; }

  /** Throws where a parameter or buffer has no value yet. */
  require() {
    for (const name of this.#missing) {
      throw new TrainerError(`'${name}' has no value: the artifact's files lack it. Load a model, `
        + "or a checkpoint that Trainer.save wrote of it");
    }
  }

  /** Parameters and buffers by torch's names, as a file. */
  model() {
    this.require();
    return encode([...this.#members].map(([name, { dtype, holder, shape, offset }]) => {
      const dims = resolve(shape, this.sizes);
      const data = this.tensors.get(holder).data.slice(offset, offset + count(dims));
      return [name, { type: dtype, dims, data }];
    }), { artifact: this.#id, step: `${this.steps}` });
  }

  /** Everything, as a file; what Python's Trainer.save writes. */
  async checkpoint(seed) {
    this.require();
    const notes = { format: CHECKPOINT, sha256: BLANK, artifact: this.#id, seed: `${seed}` };
    const digest = await sha256(encode(this.tensors, notes));
    return encode(this.tensors, { ...notes, sha256: digest });
  }

  /** Takes up a file of either kind; a checkpoint's seed, else undefined. */
  async load(file) {
    const { tensors, notes } = decode(file);
    if (notes.format !== CHECKPOINT) return this.put(tensors);
    // The digest is that of the file with zeros in its own place; notes come first.
    const place = new TextDecoder("latin1").decode(file.subarray(0, 1024)).indexOf(notes.sha256);
    if ((await sha256(new Uint8Array(file).fill(0x30, place, place + 64))) !== notes.sha256) {
      throw new TrainerError("the checkpoint is damaged: its SHA-256 is not that of its contents");
    }
    if (notes.artifact !== this.#id) {
      throw new TrainerError(`the checkpoint is of artifact ${notes.artifact}, not of ${this.#id}`);
    }
    for (const name of this.tensors.keys()) {
      if (!tensors.has(name)) throw new TrainerError(`the checkpoint lacks '${name}'`);
    }
    this.#replace(tensors);
    this.#missing.clear();
    return BigInt(notes.seed);
  }

  /** Puts some or all parameters and buffers in their places; of `shared` ones those that lack. */
  put(given, shared = false) {
    const lacking = ([name]) => !shared || this.#missing.has(name);
    const tensors = new Map([...given].filter(lacking));
    const whole = new Map();
    for (const [name, value] of tensors) {
      const member = this.#members.get(name);
      if (!member) {
        const known = [...this.#members.keys()].join(", ");
        throw new TrainerError(`'${name}' is unknown; known are ${known}`);
      }
      const { holder, shape, offset } = member;
      fit(member, value, {});
      if (shape.some(isAxis)) {
        whole.set(holder, value);
      } else {
        const { data, dims } = whole.get(holder) ?? this.tensors.get(holder);
        whole.set(holder, { data: data.slice(), dims });
        whole.get(holder).data.set(value.data, offset);
      }
    }
    this.#replace(whole);
    for (const name of tensors.keys()) this.#missing.delete(name);
  }

  /** Takes up state tensors, perhaps of other sizes; the optimizer's then start at zero. */
  #replace(values) {
    const [sizes, tensors] = [{}, new Map(this.tensors)];
    for (const [name, value] of values) {
      const port = this.#ports.get(name);
      if (!port) throw new TrainerError(`'${name}' is no state tensor of this artifact`);
      fit(port, value, sizes);
      tensors.set(name, new this.#Tensor(port.dtype, value.data, value.dims));
    }
    const all = { ...this.sizes, ...sizes };
    for (const [name, port] of this.#ports) {
      if (`${tensors.get(name).dims}` === `${resolve(port.shape, all)}`) continue;
      if (port.kind !== "optimizer") {
        throw new TrainerError(`'${name}' shares an axis that changes: give it in the same file`);
      }
      tensors.set(name, this.#zeros(port, all));
    }
    [this.tensors, this.sizes] = [tensors, all];
  }

  #zeros({ dtype, shape }, sizes) {
    const dims = resolve(shape, sizes);
    return new this.#Tensor(dtype, new ARRAYS[dtype](count(dims)), dims);
  }
}
