// Serves the page, an artifact and its rows on this machine: node browser/serve.js ARTIFACT DATA

import { readFile } from "node:fs/promises";
import { createServer } from "node:http";
import path from "node:path";

const [artifact, rows, port = "8000"] = process.argv.slice(2);
if (!rows) {
  console.error("node browser/serve.js ARTIFACT DATA [PORT]");
  process.exit(2);
}
const root = path.resolve(import.meta.dirname, "..");
const TYPES = {
  ".html": "text/html; charset=utf-8", ".css": "text/css", ".js": "text/javascript",
  ".mjs": "text/javascript", ".wasm": "application/wasm", ".json": "application/json",
};
/** What a path begins with, and the folder that it stands for; the first one counts. */
const FOLDERS = [
  ["/artifact/", artifact],
  ["/ort/", path.join(root, "node_modules/onnxruntime-web/dist")],
  ["/trainer/", root],
  ["/", path.join(root, "browser")],
];
const HEADERS = {
  // The page loads nothing from elsewhere, and sends nothing anywhere.
  "Content-Security-Policy": "default-src 'self'; script-src 'self' 'wasm-unsafe-eval'",
  "Cache-Control": "no-store",
  "X-Content-Type-Options": "nosniff",
};

function place(url) {
  const wanted = decodeURIComponent(new URL(url, "http://localhost").pathname);
  if (wanted === "/data") return path.resolve(rows);
  const [start, folder] = FOLDERS.find(([begin]) => wanted.startsWith(begin));
  const file = path.resolve(folder, wanted.slice(start.length) || "index.html");
  return file.startsWith(path.resolve(folder) + path.sep) ? file : undefined;
}

const server = createServer(async (request, response) => {
  try {
    // Another site's name that points here would read the rows.
    if (!/^(localhost|127\.0\.0\.1)(:\d+)?$/.test(request.headers.host)) throw new Error("host");
    const file = place(request.url);
    const body = await readFile(file);
    const type = TYPES[path.extname(file)] ?? "application/octet-stream";
    response.writeHead(200, { ...HEADERS, "Content-Type": type }).end(body);
  } catch {
    response.writeHead(404, HEADERS).end();
  }
});
server.on("error", (error) => {
  console.error(`serve.js: ${error.message}`);
  process.exit(1);
});
server.listen(Number(port), "127.0.0.1", () => {
  console.log(`http://127.0.0.1:${server.address().port}/`);
});
