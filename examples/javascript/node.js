// Trains an artifact on rows of a file: node node.js ARTIFACT DATA --model net.safetensors

import { readFile, writeFile } from "node:fs/promises";
import path from "node:path";
import { parseArgs } from "node:util";
import { Table } from "./table.js";
import { Trainer } from "./tessera-trainer.js";

const USAGE = `node node.js ARTIFACT DATA [options]

ARTIFACT: a folder that export.train_step wrote. DATA: its rows, as JSON or CSV (see README.md).

  --steps N      steps to take, on rows in their order; 100
  --batch N      rows a step; as many as the artifact's example batch has
  --lr X         instead of the artifact's own rate
  --seed N       of dropout's masks; 0
  --from FILE    goes on from a checkpoint (--state, or Python's Trainer.save) or a model
  --state FILE   writes a checkpoint afterwards, which Trainer.restore opens too
  --model FILE   writes parameters and buffers by torch's names, as safetensors`;

async function main() {
  const names = ["steps", "batch", "lr", "seed", "from", "state", "model"];
  const options = Object.fromEntries(names.map((name) => [name, { type: "string" }]));
  const { values, positionals } = parseArgs({ options, allowPositionals: true });
  if (positionals.length !== 2) throw new Error(USAGE);
  const [folder, rows] = positionals;
  const number = (name, usual) => {
    const value = Number(values[name] ?? usual);
    if (!(name === "lr" ? value > 0 : Number.isInteger(value) && value > 0)) {
      throw new Error(`--${name} ${values[name]}: expected a positive number`);
    }
    return value;
  };

  // As in Python: before ONNX Runtime is loaded, which otherwise writes to the user's folder.
  process.env.ORT_DISABLE_TELEMETRY ??= "1";
  const { default: ort } = await import("onnxruntime-node");
  const read = (name) => readFile(path.join(folder, name));
  const trainer = await Trainer.open(ort, read, { seed: values.seed ?? 0 });
  if (values.from) await trainer.load(await readFile(values.from));

  const { axes, graphs } = trainer.manifest;
  const ports = graphs.train.inputs.filter(({ role }) => role === "batch");
  const table = new Table(await readFile(rows, "utf8"), ports, axes);
  const [steps, size] = [number("steps", 100), number("batch", table.usual)];
  const hyper = values.lr ? { lr: number("lr") } : {};
  for (let step = 1; step <= steps; step += 1) {
    const loss = await trainer.step(table.batch(trainer.stepCount * size, size), hyper);
    if (step % Math.ceil(steps / 10) === 0 || step === steps) {
      console.log(`step ${trainer.stepCount}  loss ${loss.toPrecision(6)}`);
    }
  }
  if (values.state) await writeFile(values.state, await trainer.state());
  if (values.model) await writeFile(values.model, trainer.model());
}

main().catch((error) => {
  console.error(`node.js: ${error.message}`);
  process.exitCode = 1;
});
