// Python in a worker: loads Pyodide, unpacks the packages, and answers one message at a time with text.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const archive = fetch(new URL("lab.zip", import.meta.url)).then((reply) => {
  if (!reply.ok) throw new Error(`cannot read lab.zip: HTTP ${reply.status}`);
  return reply.arrayBuffer();
});
const python = await loadPyodide({
  indexURL: new URL("pyodide/", import.meta.url).href,
  jsglobals: {}, // `import js` finds nothing
  stderr: (line) => (line === "alive" ? postMessage({ alive: true }) : console.warn(line)), // see simulate/arena/lab.py
  // Bytecode is cached by second and size: an edit of one character that runs at once would run the old file.
  env: { HOME: "/home/pyodide", PYTHONHASHSEED: "0", PYTHONDONTWRITEBYTECODE: "1" },
});
// Unpacked, not imported from the archive: policies are found by listing their folder.
python.unpackArchive(await archive, "zip", { extractDir: "/lab" });
python.runPython("import os, sys; os.chdir('/lab'); sys.path.insert(0, '/lab')");
const answer = python.pyimport("simulate.arena.lab").answer;

// A policy may come from a stranger's link. Nothing is loaded from here on, so what could reach out goes away: the modules
// that lead to JavaScript, and what JavaScript would reach the network and the disk with. The page's Content-Security-Policy,
// which this worker inherits, forbids JavaScript from text. Properties are redefined because deleting uncovers the prototype's.
python.runPython("sys.modules.update(dict.fromkeys(['js', 'pyodide', 'pyodide_js', '_pyodide', '_pyodide_core']))");
for (const name of ["fetch", "XMLHttpRequest", "WebSocket", "WebSocketStream", "EventSource", "WebTransport", "Worker", "BroadcastChannel",
  "indexedDB", "caches", "cookieStore", "importScripts"]) {
  Object.defineProperty(self, name, { value: undefined, configurable: false, writable: false });
}
Object.defineProperty(self.navigator, "storage", { value: undefined });

self.onmessage = ({ data }) => {
  // Where the page may share memory, it interrupts Python through this buffer.
  if (data.interrupt) python.setInterruptBuffer(data.interrupt);
  else postMessage({ id: data.id, text: answer(data.request) });
};
postMessage({ ready: true });
