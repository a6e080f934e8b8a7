// Reads recorded runs from the text of a file, and makes models of them.
"use strict";
(function (root) {
  const EB = (root.EB = root.EB || {});
  // The prefix that client.compare writes before a record. JSON.parse would lose its policy, since the record has one too.
  const TEXT = String.raw`"(?:[^"\\]|\\.)*"`;
  const LABELS = new RegExp(`^\\{"policy": (${TEXT}), "load": (${TEXT}), "repeat": (\\d+), `);

  // The recorded runs in a file with one record, arrival or departure per line, as in /events or a trace file. In a file of
  // several runs each line names policy, load and repeat; otherwise a new run starts where the step numbers restart.
  // Only runs with the same `load` had the same requests; it is empty if the file names none.
  function parseRuns(text) {
    const runs = new Map();
    let state = null, label = "", part = 0, before = -1, waiting = { arrivals: [], departures: [] };
    const parse = (line) => {
      try {
        return JSON.parse(line);
      } catch {
        return {}; // a line that was cut off
      }
    };
    for (const line of text.split("\n")) {
      const trimmed = line.startsWith("data:") ? line.slice(5).trim() : line.trim();
      if (trimmed[0] !== "{") continue;
      const value = parse(trimmed);
      const record = value.iteration?.members ? value.iteration : value;
      if (Array.isArray(record.members) && record.slot_steps) {
        const labels = LABELS.exec(trimmed);
        if ((labels?.[0] ?? "") !== label) {
          label = labels?.[0] ?? "";
          part = 0;
        } else if (record.n <= before) {
          part++;
        }
        before = record.n;
        const key = `${part} ${label}`;
        if (!runs.has(key)) runs.set(key, { ...named(labels, part), records: [], state, ...waiting });
        const run = runs.get(key);
        if (run.arrivals !== waiting.arrivals) waiting = run;
        record.joined = record.joined || [];
        record.left = record.left || [];
        run.records.push(record);
      } else if (value.slots && value.policy) {
        state = value;
        waiting = { arrivals: [], departures: [] };
      } else if (value.id && value.max_tokens !== undefined) waiting.arrivals.push(value);
      else if (value.id && value.reason) waiting.departures.push(value);
    }
    const all = [...runs.values()];
    const repeated = new Set(all.filter((run) => run.repeat).map((run) => run.load));
    return all.map((run) => (repeated.has(run.load) ? { ...run, load: `${run.load} #${run.repeat + 1}` } : run));
  }

  function named(labels, part) {
    const again = part ? `run ${part + 1}` : "";
    if (!labels) return { name: again, load: "", repeat: 0 };
    const [name, load, repeat] = labels.slice(1).map((text) => JSON.parse(text));
    return { name: [name, again].filter(Boolean).join(", "), load, repeat };
  }

  // The numbers of the requests of several runs by id, in the order of the arrivals; null unless the runs share them.
  function numbersOf(runs) {
    const orders = runs.map(({ arrivals, records }) => [...new Set([
      ...[...arrivals].sort((a, b) => a.t - b.t).map((arrival) => arrival.id),
      ...records.flatMap((record) => record.joined ?? []),
    ])]);
    const longest = orders.reduce((a, b) => (b.length > a.length ? b : a), []);
    const numbers = new Map(longest.map((id, k) => [id, k + 1]));
    return orders.every((ids) => ids.every((id) => numbers.has(id))) ? numbers : null;
  }

  // A model of a whole recorded run.
  function modelOf(run, numbers = null) {
    const model = new EB.Model(Math.max(2000, run.records.length), numbers);
    for (const arrival of run.arrivals) model.arrival(arrival);
    for (const record of run.records) model.add(record);
    for (const departure of run.departures) model.departure(departure);
    return model;
  }

  Object.assign(EB, { parseRuns, numbersOf, modelOf });
})(globalThis);
