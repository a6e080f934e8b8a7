// What the guided tour shows: six stops, each with a policy, a load, a paragraph, and the figures and the sentence that
// are measured on this server's own steps. It does not switch anything; the tour does.
"use strict";
(function (root) {
  const EB = (root.EB = root.EB || {});
  const SPAN = 10; // seconds that are measured
  const LEAST = 2; // seconds before a figure is shown

  const seconds = (value) => EB.seconds(value);
  const percent = (share) => (share === null ? "–" : EB.percent(share));
  const rate = (m) => `${EB.figure(m.tokensPerSecond)} tokens/s`;
  const PACE = [["tokens/s", (m) => EB.figure(m.tokensPerSecond)], ["slots taken", (m) => percent(m.fill)],
    ["rows held", (m) => percent(m.held)]];
  const STEPS = [["usual step", (m) => seconds(m.step)], ["step with a long prompt", (m) => seconds(m.promptStep)],
    ["steps for the prompt", (m) => (m.chunks ? String(m.chunks) : "–")]];
  const HITS = [["cache hits", (m) => `${m.hits} of ${m.joined}`], ["tokens saved", (m) => EB.count(m.cached)],
    ["first token, hit", (m) => seconds(m.firstHit)], ["first token, no hit", (m) => seconds(m.firstMiss)]];
  const WAITS = [["quiet waits", (m) => seconds(m.waits.quiet)], ["loud waits", (m) => seconds(m.waits.loud)]];

  // load(slots) is the body of POST /load, options(slots) those of the policy; `versus` is what a stop can be
  // compared with: the button says `label`, and while it is shown `undo`. finding(m, of) says what the measured figures m
  // come to; of(policy) are those of another policy under the same load, or undefined. A reader may guess before that: right(m, of)
  // returns the first choice, the second, or undefined as long as it is not measured. `axis` is what a column shows.
  const STOPS = [
    {
      title: "One at a time", policy: "nobatch", load: plain, figures: PACE,
      text: "The server computes one request from its prompt to its last token, and only then takes the next. One slot "
        + "works and the others stay empty, while everyone else waits in line.",
      guess: { ask: "How much of the machine is used?", choices: ["about half", "hardly any"], right: (m) => (m.fill > 0.3 ? 0 : 1) },
      // 100 less the percentage in the table, because both rounded could sum to 101.
      finding: (m) => `In the last ${EB.count(m.seconds)} s, ${100 - Math.round(100 * m.fill)} % of the slots were empty: ${rate(m)}.`,
    },
    {
      title: "Static batching and its held rows", policy: "static", load: plain, figures: PACE,
      text: "Requests now start together, as many as there are slots, and nobody joins until the longest answer is finished. "
        + "A request that is done early keeps its slot: its row is held (hatched). Held rows are still computed, but give no "
        + "token, while those in line wait for the whole batch.",
      guess: { ask: "Against one at a time, this is", choices: ["faster", "slower"], right: faster("static", "nobatch") },
      finding: (m) => `In the last ${EB.count(m.seconds)} s, ${part(m)} rows were held: computed for requests that were already done.`,
    },
    {
      title: "Dynamic batching: no held rows", policy: "dynamic", load: plain, figures: PACE,
      text: "Requests join and leave between any two steps. As soon as one is done, its slot goes to the next in line, so no "
        + "row is held, and the batch stays full while anyone waits. Server and load are the same; only who joins and leaves "
        + "has changed.",
      guess: { ask: "Against static batching, this is", choices: ["faster", "slower"], right: faster("dynamic", "static") },
      finding(m, of) {
        const other = of("static");
        if (!other) return `In the last ${EB.count(m.seconds)} s, ${part(m)} rows were held: ${rate(m)}.`;
        return `With static, ${part(other)} rows were computed for nothing; with dynamic, under the same load, ${part(m)}. `
          + `That makes ${rate(m)} instead of ${EB.figure(other.tokensPerSecond)}.`;
      },
    },
    {
      title: "Long prompts, in chunks", policy: "chunked", options: chunks, load: long, figures: STEPS, axis: "time",
      versus: {
        label: "Without chunks", undo: "With chunks", policy: "dynamic",
        text: "Without chunks, a long prompt is read in one step. That step takes several times as long as the others, and every "
          + "running request waits that long for its next token. In the picture, such a prompt has few dark cells.",
      },
      text: "Before its first token, a request must read its prompt. If a long prompt is read in one step, every other request "
        + "waits for its next token. In chunks, a step computes only a few dozen prompt tokens: the dark cells of one prompt "
        + "stretch over several short steps, and the others get a token in each.",
      guess: {
        ask: "The longest pause between two tokens is shorter", choices: ["with chunks", "without"],
        right(m, of) {
          const [whole, inChunks] = [of("dynamic"), of("chunked")];
          return whole && inChunks ? Number(inChunks.promptStep > whole.promptStep) : undefined;
        },
      },
      finding(m, of) {
        const [whole, inChunks] = [of("dynamic"), of("chunked")];
        if (!whole || !inChunks) return `A step that reads a long prompt takes ${seconds(m.promptStep)}, a usual one ${seconds(m.step)}.`;
        return `A step that reads a long prompt takes ${seconds(inChunks.promptStep)} with chunks, and ${seconds(whole.promptStep)} without.`;
      },
    },
    {
      title: "Shared prefixes", policy: "chunked", options: chunks, load: shared, figures: HITS,
      text: "Three of four prompts begin with the same long text, as instructions to a chat bot would. Its keys and values are "
        + "computed once and kept. A request that begins the same takes them from the cache (◇), skips that part of its "
        + "prompt, and writes its first token sooner. The others read all of their prompt: the long dark blocks.",
      guess: {
        ask: "The first token comes sooner to a request that finds its beginning", choices: ["in the cache", "nowhere"],
        right: (m) => (m.firstHit === null || m.firstMiss === null ? undefined : Number(m.firstHit > m.firstMiss)),
      },
      finding(m) {
        if (!m.hits || m.firstMiss === null) return `${m.hits} of ${m.joined} requests found their beginning in the cache.`;
        return `${m.hits} of ${m.joined} requests found their beginning in the cache: first token after ${seconds(m.firstHit)}, `
          + `the others after ${seconds(m.firstMiss)}.`;
      },
    },
    {
      title: "Fairness", policy: "dynamic+vtc", load: twoClients, figures: WAITS,
      versus: {
        label: "First come, first served", undo: "Back to vtc", policy: "dynamic",
        text: "First come, first served: the same two clients, but the quiet one, lit up in the picture, stands behind all of the "
          + "loud one's line, and waits as long as the loud one does.",
      },
      lit: (request) => EB.clientOf(request) === "quiet",
      text: "Two clients share the server: a loud one with a long line of requests, and a quiet one that asks now and then. "
        + "First come, first served puts the quiet one behind all of the loud one's line. Here the client that was served "
        + "less goes first (vtc), so the quiet one, lit up in the picture, hardly waits.",
      guess: {
        ask: "Whose requests wait longer?", choices: ["the quiet client's", "the loud one's"],
        right: ({ waits }) => (waits.quiet === null || waits.loud === null ? undefined : Number(waits.loud > waits.quiet)),
      },
      finding(m, of) {
        if (m.waits.quiet === null || m.waits.loud === null) return "";
        const [fair, served] = [of("dynamic+vtc"), of("dynamic")];
        if (!fair || !served) return `The quiet client waits ${seconds(m.waits.quiet)}, the loud one ${seconds(m.waits.loud)}.`;
        return `The quiet client waits ${seconds(fair.waits.quiet)} with vtc, and ${seconds(served.waits.quiet)} with first come, first served.`;
      },
    },
  ];

  // Whether a policy made more tokens per second than another: 0, or 1 if not.
  function faster(policy, other) {
    return (m, of) => (of(policy) && of(other) ? Number(of(policy).tokensPerSecond <= of(other).tokensPerSecond) : undefined);
  }

  // How many rows were held, of those computed.
  function part(m) {
    return `${m.heldRows ? EB.count(m.heldRows) : "none"} of ${EB.count(m.rows)}`;
  }

  // A token for each slot, and 56 for prompts.
  function chunks(slots) {
    return { max_batched_tokens: slots + 56 };
  }

  function plain(slots) {
    return { users: capped(2 * slots), pause: 0.4, min_tokens: 8, max_tokens: 48, seed: 1 };
  }

  function long(slots) {
    return { users: capped(1.5 * slots), pause: 0.4, min_tokens: 16, max_tokens: 64, seed: 2, prompts: "long" };
  }

  function shared(slots) {
    return { users: capped(1.5 * slots), pause: 0.4, min_tokens: 16, max_tokens: 48, seed: 3, prompts: "shared" };
  }

  function twoClients(slots) {
    return { users: capped(4 * slots), quiet_users: 2, pause: 0.1, min_tokens: 8, max_tokens: 48, seed: 4 };
  }

  function capped(users) {
    return Math.min(256, Math.ceil(users));
  }

  // The figures of the last seconds under a policy since step `from`; null before there are enough. What ran at the switch
  // runs on under the new policy, so they begin when the last of it has left. The switch may be some steps after `from`,
  // because the page is behind the server.
  function measure(model, from, policy) {
    const { columns } = model;
    const start = columns.findLastIndex((column) => column.n < from || column.policy !== policy) + 1;
    const since = columns.findLastIndex((column, k) => k < start || !isOf(model, column, columns[start].n)) + 1;
    const last = columns[columns.length - 1];
    if (!last || since >= columns.length || last.end - columns[since].t < LEAST) return null;
    let first = columns.length - 1;
    while (first > since && columns[first - 1].t > last.end - SPAN) first--;
    const recent = columns.slice(first);
    const { cells, steps } = model.count(first, columns.length);
    const all = Object.values(steps).reduce((a, b) => a + b, 0);
    const rows = cells.prefill + cells.decode + cells.held;
    const most = Math.max(...recent.map((column) => column.tokens));
    const times = (columns) => columns.map((column) => column.seconds);
    const came = [...model.requests.values()].filter((r) => r.arrived !== null && r.arrived >= columns[since].t && r.joinedAt >= from);
    const median = (values) => EB.percentile(values.filter((value) => value !== null), 50);
    const first_ = (r) => (r.first === null ? null : r.first - r.joined);
    const waits = (client) => median(came.filter((r) => EB.clientOf(r) === client).map((r) => r.joined - r.arrived));
    return {
      span: last.end - columns[since].t, seconds: last.end - recent[0].t,
      tokensPerSecond: recent.reduce((sum, column) => sum + column.output, 0) / (last.end - recent[0].t),
      fill: all ? 1 - steps.idle / all : null,
      rows, heldRows: cells.held, held: rows ? cells.held / rows : null,
      step: median(times(recent)), promptStep: median(times(recent.filter((column) => column.tokens > most / 2))),
      chunks: mostChunks(model, since),
      joined: came.length, hits: came.filter((r) => r.hit > 0).length, cached: came.reduce((sum, r) => sum + r.hit, 0),
      firstHit: median(came.filter((r) => r.hit > 0).map(first_)), firstMiss: median(came.filter((r) => !r.hit).map(first_)),
      waits: { quiet: waits("quiet"), loud: waits("loud") },
    };
  }

  // Whether all members of a step have joined since step `from`.
  function isOf(model, column, from) {
    return column.who.every((number) => !number || (model.requests.get(number)?.joinedAt ?? 0) >= from);
  }

  // In how many steps the prompt of a request was computed, at most.
  function mostChunks(model, since) {
    const counts = new Map();
    for (const column of model.columns.slice(since)) {
      for (let slot = 0; slot < column.slots; slot++) {
        if (column.kind(slot) === EB.KIND.PREFILL) counts.set(column.who[slot], (counts.get(column.who[slot]) ?? 0) + 1);
      }
    }
    return Math.max(0, ...counts.values());
  }

  Object.assign(EB, { STOPS, measure });
})(globalThis);
