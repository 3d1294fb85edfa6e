// Trains an artifact of Tessera's on an ONNX Runtime that is passed in, onnxruntime-node or
// onnxruntime-web: what device_sdk.Trainer computes in Python, by the same graph.

import { feeds, select, TrainerError } from "./fit.js";
import { count, decode } from "./safetensors.js";
import { sha256, State } from "./state.js";

export { TrainerError };
/** Loss or new state is NaN or infinite. The step was dropped: everything is as before it. */
export class NonFiniteStep extends TrainerError {}

/** What a step's random numbers derive from: SplitMix64 of a run's seed and the step, 31 bits. */
export function stepSeed(seed, step) {
  const mask = (1n << 64n) - 1n;
  let value = (seed * 0x9e3779b97f4a7c15n + (step + 1n) * 0xd1b54a32d192ed03n) & mask;
  value = ((value ^ (value >> 30n)) * 0xbf58476d1ce4e5b9n) & mask;
  value = ((value ^ (value >> 27n)) * 0x94d049bb133111ebn) & mask;
  return (value ^ (value >> 31n)) >> 33n;
}

function parsed(bytes) {
  let manifest;
  try {
    manifest = JSON.parse(new TextDecoder().decode(bytes));
  } catch (error) {
    throw new TrainerError(`manifest.json is no JSON, so no artifact's: ${error.message}`);
  }
  if (manifest?.format !== "tessera-artifact" || manifest.format_version !== 1) {
    throw new TrainerError("manifest.json is not that of an artifact of format version 1");
  }
  return manifest;
}

export class Trainer {
  #ort;
  #options;
  #files = {};
  #sessions = {};
  #state;
  #bounds; // what a graph that writes its state in place knows of it
  #busy = false;

  /**
   * Opens an artifact's folder. `read(name)` gives, or promises, a file's bytes as a Uint8Array.
   *
   * `id`: the artifact's id where it is known; any other is refused. `seed`: of dropout's masks.
   * `options`: of ONNX Runtime's sessions, beside ours.
   */
  static async open(ort, read, { id, seed = 0, options = {} } = {}) {
    const trainer = new Trainer();
    const bytes = await read("manifest.json");
    trainer.id = await sha256(bytes);
    if (id !== undefined && id !== trainer.id) {
      throw new TrainerError(`this artifact's id is ${trainer.id}, expected ${id}`);
    }
    const manifest = parsed(bytes);
    const checked = async (name, entry) => {
      const data = await read(name);
      if (data.length !== entry.bytes || (await sha256(data)) !== entry.sha256) {
        throw new TrainerError(`${name} is not the file that manifest.json describes`);
      }
      return data;
    };
    const { "initial.safetensors": initial, ...graphs } = manifest.files;
    await Promise.all(Object.entries(graphs).map(async ([name, entry]) => {
      trainer.#files[name] = await checked(name, entry);
    }));
    trainer.manifest = manifest;
    trainer.seed = BigInt(seed);
    trainer.#ort = ort;
    // One thread: an embedding's gradient is a sum that races under several.
    // Failures are thrown, not printed as well.
    const ours = { intraOpNumThreads: 1, interOpNumThreads: 1, logSeverityLevel: 4 };
    trainer.#options = { ...ours, ...options };
    trainer.#state = new State(manifest, trainer.id, ort.Tensor);
    trainer.#state.put(decode(await checked("initial.safetensors", initial)).tensors);
    if (manifest.shared) { // by all rungs of a ladder, which need not have all of it
      const file = await checked(`../${manifest.shared.sha256}.safetensors`, manifest.shared);
      trainer.#state.put(decode(file).tensors, true);
    }
    // What a ladder's rungs train comes with its task, or by `load`.
    if (!manifest.submodel) trainer.#state.require();
    await trainer.#session("train");
    return trainer;
  }

  /** Trains on {entry: {data, dims}}; the loss. `hyper` goes before defaults: {lr: 0.1}. */
  async step(batch, hyper = {}) {
    const { inputs, outputs } = this.manifest.graphs.train;
    const known = select(inputs, "hyper").map(({ of }) => of);
    for (const [name, value] of Object.entries(hyper)) {
      if (!known.includes(name) || !Number.isFinite(Math.fround(value))) {
        throw new TrainerError(`hyper.${name} is ${value}; finite numbers are taken for: ${known}`);
      }
    }
    const others = {
      hyper: ({ of, default: usual }) => ["float32", Float32Array.of(hyper[of] ?? usual), []],
      seed: () => ["int64", BigInt64Array.of(stepSeed(this.seed, this.#state.steps)), []],
      bounds: ({ shape }) => (
        ["float32", this.#bounds ?? new Float32Array(count(shape)).fill(Infinity), shape]),
    };
    return this.#alone(async () => {
      const found = await this.#run("train", batch, others);
      const [loss, guard, bounds] = ["loss", "guard", "bounds"].map((role) => (
        found[select(outputs, role)[0]?.name]?.data));
      if (!Number.isFinite(loss[0]) || !Number.isFinite(guard[0])) {
        throw new NonFiniteStep(`loss ${loss[0]}, guard ${guard[0]}: the step was dropped`);
      }
      for (const { name, of } of select(outputs, "state")) this.#state.tensors.set(of, found[name]);
      this.#bounds = bounds;
      return loss[0];
    });
  }

  /** Outputs in evaluation mode, {name: Tensor}; the batch may hold what only training needs. */
  async predict(batch) {
    const { infer } = this.manifest.graphs;
    if (!infer) throw new TrainerError("this artifact has no graph to predict with");
    const found = await this.#alone(() => this.#run("infer", batch));
    return Object.fromEntries(infer.outputs.map(({ of, name }) => [of, found[name]]));
  }

  /** Finished steps since the initial state. */
  get stepCount() { return Number(this.#state.steps); }

  /** All state, the optimizer's and the step count too: the file that Trainer.save writes. */
  async state() { return this.#state.checkpoint(this.seed); }

  /** Parameters and buffers by torch's names, as a safetensors file. */
  model() { return this.#state.model(); }

  /** Takes up a file: of `state` or Trainer.save, or some or all parameters by torch's names. */
  async load(file) {
    return this.#alone(async () => {
      this.seed = await this.#state.load(file) ?? this.seed;
      this.#bounds = undefined;
    });
  }

  /** One call at a time: a step reads the state that the one before it wrote. */
  async #alone(work) {
    if (this.#busy) throw new TrainerError("a call has not ended: await it first");
    this.#busy = true;
    try {
      return await work();
    } finally {
      this.#busy = false;
    }
  }

  /** Runs a graph; `others` make the inputs of roles that are neither state nor batch. */
  async #run(name, batch, others) {
    this.#state.require();
    const given = feeds(this.manifest, name, batch, this.#state.sizes);
    const inputs = this.manifest.graphs[name].inputs.map((port) => {
      if (port.role === "state") return [port.name, this.#state.tensors.get(port.of)];
      return [port.name, new this.#ort.Tensor(...(given[port.name] ?? others[port.role](port)))];
    });
    return (await this.#session(name)).run(Object.fromEntries(inputs));
  }

  async #session(name) {
    const file = this.#files[this.manifest.graphs[name].file];
    this.#sessions[name] ??= await this.#ort.InferenceSession.create(file, this.#options);
    return this.#sessions[name];
  }
}
