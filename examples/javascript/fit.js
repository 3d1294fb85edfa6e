// Does what is given fit what an artifact's manifest says of it?

import { ARRAYS, count } from "./safetensors.js";

/** Says what is wrong with an artifact, a batch or a file, and what was expected. */
export class TrainerError extends Error {}

export const isAxis = (size) => typeof size === "string";
export const resolve = (shape, sizes) => shape.map((size) => (isAxis(size) ? sizes[size] : size));
export const select = (ports, role) => ports.filter((port) => port.role === role);
const described = ({ of, name, dtype, shape }) => `${of ?? name}: ${dtype}[${shape.join(", ")}]`;

/** Throws unless `value` is {data, dims} of a port's dtype and shape; notes sizes of new axes. */
export function fit(port, value, sizes, refuse = (why) => {
  throw new TrainerError(`'${port.of ?? port.name}' ${why}; expected ${described(port)}`);
}) {
  const { data, dims } = value ?? {};
  const Elements = ARRAYS[port.dtype];
  if (!ArrayBuffer.isView(data) || !Array.isArray(dims)) refuse("is no {data, dims}");
  if (!(data instanceof Elements)) refuse(`holds a ${data.constructor.name}, not ${Elements.name}`);
  const is = `is [${dims.join(", ")}]`;
  if (count(dims) !== data.length) refuse(`${is}, with ${data.length} elements`);
  if (dims.length !== port.shape.length) refuse(`${is}, not of ${port.shape.length} axes`);
  port.shape.forEach((wanted, place) => {
    const size = isAxis(wanted) ? sizes[wanted] ??= dims[place] : wanted;
    const axis = isAxis(wanted) ? `'${wanted}'` : place;
    if (dims[place] !== size) refuse(`${is}, but axis ${axis} has ${size}`);
    if (size === 0) refuse(`${is}, which is empty`);
  });
}

/** The batch as inputs of a graph, {input's name: [dtype, data, dims]}. */
export function feeds({ axes, graphs, ignored = [] }, graph, batch, stateSizes) {
  const ports = select(graphs[graph].inputs, "batch");
  const others = Object.values(graphs).flatMap(({ inputs }) => select(inputs, "batch"));
  const known = new Set([...others.map(({ of }) => of), ...ignored]);
  const refuse = (why) => {
    const expected = ports.map(described).join(", ");
    throw new TrainerError(`batch refused: ${why}. This artifact expects {${expected}}`);
  };
  for (const name of Object.keys(batch)) if (!known.has(name)) refuse(`'${name}' is unknown`);
  const sizes = { ...stateSizes };
  const found = ports.map((port) => {
    if (!Object.hasOwn(batch, port.of)) refuse(`'${port.of}' is missing`);
    const value = batch[port.of];
    fit(port, value, sizes, (why) => refuse(`'${port.of}' ${why}`));
    return [port.name, [port.dtype, value.data, value.dims]];
  });
  for (const [axis, size] of Object.entries(sizes)) {
    const { least = 1, least_to_train: toTrain = 1 } = axes[axis];
    const needed = graph === "train" ? Math.max(least, toTrain) : least;
    if (size < needed) refuse(`axis '${axis}' has ${size}, and needs ${needed} or more`);
  }
  return Object.fromEntries(found);
}
