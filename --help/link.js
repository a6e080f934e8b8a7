// A race, with or without a policy, in the fragment of an address, which no host ever sees. It knows nothing of what it
// carries.
"use strict";
(function (root) {
  const EB = (root.EB = root.EB || {});
  const LARGEST = 200000; // characters of a fragment that are read, and of what they unpack to

  async function through(bytes, stream) {
    return new Response(new Blob([bytes]).stream().pipeThrough(stream)).arrayBuffer();
  }

  // The fragment of a value: JSON, compressed, in the letters that an address may have.
  async function pack(value) {
    const bytes = new Uint8Array(await through(JSON.stringify(value), new CompressionStream("deflate-raw")));
    const text = Array.from(bytes, (byte) => String.fromCharCode(byte)).join("");
    return `#${btoa(text).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "")}`;
  }

  // The value in a fragment; an error in plain words if it is damaged.
  async function unpack(fragment) {
    try {
      if (fragment.length > LARGEST) throw new Error("too long");
      const text = atob(fragment.slice(1).replaceAll("-", "+").replaceAll("_", "/"));
      const bytes = Uint8Array.from(text, (character) => character.charCodeAt(0));
      const reader = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw")).getReader();
      const parts = [];
      let size = 0;
      for (let part = await reader.read(); !part.done; part = await reader.read()) {
        size += part.value.length;
        if (size > LARGEST) throw new Error("too long");
        parts.push(part.value);
      }
      const value = JSON.parse(await new Blob(parts).text());
      if (!["string", "undefined"].includes(typeof value?.text) || !Array.isArray(value?.racers)) throw new Error("no race");
      return value;
    } catch {
      throw new Error("this link is damaged: nothing can be read from it. Ask for it again");
    }
  }

  EB.link = { pack, unpack };
})(globalThis);
