// An app's rows, from JSON or CSV, as the batches of an artifact.
//
// JSON: {"x": [[0.1, 0.2], [0.3, 0.4]], "y": [0, 1]}, a row of each entry for a sample; a number
// that is no list is the same for every step. CSV: a line of names, `x.0,x.1,y`, and a line for a
// sample; an entry's numbers are counted from 0, in C order.

import { ARRAYS, count } from "./safetensors.js";

function columns(text) {
  if (text.trimStart().startsWith("{")) return JSON.parse(text);
  const [names, ...lines] = text.trim().split(/\r?\n/).map((line) => line.split(","));
  const found = {};
  names.forEach((name, place) => {
    const entry = name.trim().replace(/\.\d+$/, "");
    found[entry] ??= lines.map(() => []);
    lines.forEach((cells, row) => found[entry][row].push(Number(cells[place])));
  });
  return found;
}

export class Table {
  #columns = [];

  /** `ports`: of the graph's inputs those of role "batch"; `axes`: the manifest's. */
  constructor(text, ports, axes) {
    const given = columns(text);
    for (const { of, dtype, shape } of ports) {
      if (!(of in given)) throw new Error(`the data lacks '${of}': ${dtype}[${shape.join(", ")}]`);
      const Elements = ARRAYS[dtype];
      const numbers = [given[of]].flat(Infinity);
      const data = Elements.from(numbers, Elements === BigInt64Array ? BigInt : Number);
      const row = shape.slice(1).map((size) => axes[size]?.example ?? size);
      const rows = data.length / count(row);
      if (shape.length && !Number.isInteger(rows)) {
        throw new Error(`'${of}' has ${data.length} numbers: they are no rows of [${row}]`);
      }
      this.#columns.push({ of, data, row, scalar: !shape.length, rows });
    }
    const lengths = this.#columns.filter(({ scalar }) => !scalar).map(({ rows }) => rows);
    this.rows = lengths[0] ?? 1;
    if (lengths.some((rows) => rows !== this.rows) || !this.rows) {
      throw new Error(`every entry needs as many rows, and one or more; there are ${lengths}`);
    }
    const size = ports.find(({ shape }) => shape.length)?.shape[0] ?? 1;
    this.usual = axes[size]?.example ?? size;
  }

  /** `size` rows from row `first` on; after the last comes the first again. */
  batch(first, size) {
    return Object.fromEntries(this.#columns.map(({ of, data, row, scalar }) => {
      if (scalar) return [of, { data, dims: [] }];
      const width = count(row);
      const part = new data.constructor(size * width);
      for (let place = 0; place < size; place += 1) {
        const begin = ((first + place) % this.rows) * width;
        part.set(data.subarray(begin, begin + width), place * width);
      }
      return [of, { data: part, dims: [size, ...row] }];
    }));
  }
}
