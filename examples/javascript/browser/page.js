// The page: trains the served artifact on the served rows, by onnxruntime-web's WebAssembly.

import * as ort from "/ort/ort.wasm.min.mjs";
import { Table } from "/trainer/table.js";
import { Trainer } from "/trainer/tessera-trainer.js";

ort.env.wasm.wasmPaths = "/ort/";
ort.env.wasm.numThreads = 1;

const $ = (id) => document.getElementById(id);
const losses = [];
let stopped = false;

async function fetched(url) {
  const response = await fetch(url);
  if (!response.ok) throw new Error(`${url}: ${response.status} ${response.statusText}`);
  return new Uint8Array(await response.arrayBuffer());
}

function draw() {
  const [low, high] = [Math.min(...losses), Math.max(...losses)];
  const points = losses.map((loss, place) => {
    const x = (640 * place) / Math.max(1, losses.length - 1);
    return `${x.toFixed(1)},${(230 - (220 * (loss - low)) / (high - low || 1)).toFixed(1)}`;
  });
  $("loss").setAttribute("points", points.join(" "));
}

function show(running) {
  for (const id of ["train", "model", "state"]) $(id).disabled = running;
  $("stop").disabled = !running;
  if (!losses.length) return;
  draw();
  const [first, last] = [losses[0], losses.at(-1)].map((loss) => loss.toPrecision(4));
  $("status").textContent = `Step ${trainer.stepCount}: loss ${last}, at first ${first}.`;
}

function offer(bytes, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([bytes]));
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}

/** Runs what a control asks for; says what went wrong. */
async function attempt(work) {
  $("problem").textContent = "";
  try {
    await work();
  } catch (error) {
    $("problem").textContent = error.message;
  }
}

/** Takes steps of `size` rows, in the rows' order; the page stays usable. */
export async function train(steps, size) {
  stopped = false;
  try {
    for (let step = 0; step < steps && !stopped; step += 1) {
      losses.push(await trainer.step(table.batch(trainer.stepCount * size, size)));
      if (step % 10 === 9) {
        show(true);
        await new Promise(requestAnimationFrame);
      }
    }
  } finally {
    show(false);
  }
}

export let trainer;
let table;
await attempt(async () => {
  trainer = await Trainer.open(ort, (name) => fetched(`/artifact/${name}`));
  const { axes, graphs, name } = trainer.manifest;
  const ports = graphs.train.inputs.filter(({ role }) => role === "batch");
  table = new Table(new TextDecoder().decode(await fetched("/data")), ports, axes);
  $("about").textContent = `${name}, on ${table.rows} rows that stay on this machine.`;
  $("size").value = table.usual;
  show(false);
});

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  attempt(() => train(Number($("steps").value), Number($("size").value)));
});
$("stop").addEventListener("click", () => { stopped = true; });
$("model").addEventListener("click", () => (
  attempt(() => offer(trainer.model(), `${trainer.manifest.name}.safetensors`))));
$("state").addEventListener("click", () => (
  attempt(async () => offer(await trainer.state(), `${trainer.manifest.name}.state`))));
$("file").addEventListener("change", (event) => attempt(async () => {
  const [file] = event.target.files;
  await trainer.load(new Uint8Array(await file.arrayBuffer()));
  show(false);
}));
