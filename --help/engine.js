// Python in the background: starts its worker, asks it one question at a time, and stops what does not end. It knows neither
// the questions nor the page.
"use strict";
(function (root) {
  const EB = (root.EB = root.EB || {});
  const GRACE = 1000; // ms from the interrupt to the end of the worker
  const LONGEST = 120000; // ms after which an answer is stopped
  const SIGINT = 2;
  const STOPPED = "stopped. If you did not press Stop, a loop may never end";

  class Engine {
    // `changed` is called with "loading", "ready", "busy" or "failed".
    constructor(changed) {
      this.changed = changed;
      this.asked = 0;
      this.restarts = 0;
      this.start();
    }

    start() {
      this.tell("loading");
      this.isUsed = false;
      this.interrupt = null;
      // A worker from a blob inherits the page's Content-Security-Policy; one from an address would have its host's, if any.
      const source = `import ${JSON.stringify(new URL("worker.js", location).href)};`;
      const address = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
      let isReady = false;
      const worker = (this.worker = new Worker(address, { type: "module" }));
      this.ready = new Promise((resolve) => {
        worker.onerror = (event) => {
          event.preventDefault();
          if (isReady) this.restart();
          else this.tell("failed");
          this.settle(JSON.stringify({ error: { line: null, words: `Python failed: ${event.message || "it cannot be loaded"}` } }));
        };
        worker.onmessage = ({ data }) => {
          if (!data.ready) {
            if (data.id === this.pending?.id) this.settle(data.text);
            return;
          }
          isReady = true;
          URL.revokeObjectURL(address);
          if (root.crossOriginIsolated) {
            this.interrupt = new Uint8Array(new SharedArrayBuffer(1));
            worker.postMessage({ interrupt: this.interrupt });
          }
          if (!this.pending) this.tell("ready");
          resolve();
        };
      });
    }

    tell(state) {
      this.state = state;
      this.changed(state);
    }

    // Answer a question with the worker's text. `fresh`: by a worker that no question before `taints`: a user's code could have
    // changed there what the next is graded by.
    async ask(question, { fresh = false, taints = true } = {}) {
      if (this.pending) throw new Error("a question is being answered");
      const asked = (this.pending = { id: ++this.asked });
      const text = new Promise((resolve) => (asked.resolve = resolve));
      if (fresh && this.isUsed) this.restart();
      await Promise.race([this.ready, text]);
      if (this.pending === asked) {
        this.isUsed ||= taints;
        this.tell("busy");
        if (this.interrupt) this.interrupt[0] = 0;
        asked.longest = setTimeout(() => this.stop(), LONGEST);
        this.worker.postMessage({ id: asked.id, request: JSON.stringify(question) });
      }
      return text;
    }

    settle(text) {
      const asked = this.pending;
      if (!asked) return;
      clearTimeout(asked.longest);
      clearTimeout(asked.grace);
      this.pending = null;
      if (this.state === "busy") this.tell("ready");
      asked.resolve(text);
    }

    // Interrupt Python; where that cannot be, or does not help (a loop within C, or one that catches everything), end the worker.
    stop() {
      if (!this.pending) return;
      if (!this.interrupt || this.state !== "busy") this.end();
      else {
        this.interrupt[0] = SIGINT;
        this.pending.grace ??= setTimeout(() => this.end(), GRACE);
      }
    }

    end() {
      this.restart();
      this.settle(JSON.stringify({ error: { line: null, words: STOPPED } }));
      this.tell("loading");
    }

    restart() {
      this.worker.terminate();
      this.restarts++;
      this.start();
    }
  }

  Object.assign(EB, { Engine });
})(globalThis);
