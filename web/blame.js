// Which other requests made one wait or slowed its tokens: a button that asks the server, which simulates it, and the answer.
"use strict";
(function (root) {
  const EB = (root.EB = root.EB || {});
  const { counted, element, seconds } = EB;
  const SHOWN = 5; // requests that are named,
  const LEAST = 0.01; // if they made at least this share of the time

  function time(milliseconds) {
    return `${milliseconds < 0 ? "−" : ""}${seconds(Math.abs(milliseconds) / 1000)}`;
  }

  function called(id, numbers) {
    return numbers.has(id) ? `#${numbers.get(id)}` : id.slice(0, 8);
  }

  // One part of a request's time, the worst culprit first; `numbers` has the requests' numbers on this page by id.
  function sentence(verb, part, answer, numbers) {
    const { measured, simulated, alone, residual } = answer[part];
    const others = answer.others.filter((other) => other[part]).sort((a, b) => b[part] - a[part]);
    const worst = others.slice(0, SHOWN).filter((other) => Math.abs(other[part]) >= LEAST * simulated);
    const words = worst.map((other) => {
      return `${time(other[part])} because of ${called(other.id, numbers)}${other.client && ` (${other.client})`}`;
    });
    const more = others.slice(worst.length);
    if (more.length) words.push(`${time(more.reduce((sum, other) => sum + other[part], 0))} because of ${counted(more.length, "other")}`);
    if (alone) words.unshift(`${time(alone)} even alone`);
    if (residual <= -0.05) words.push(`less ${time(-residual)} that these count more than once`);
    if (residual >= 0.05) words.push(`${time(residual)} that no single request explains`);
    const again = time(measured) === time(simulated) ? "" : ` (simulated ${time(simulated)})`;
    return `It ${verb} ${time(measured)}${again}${words.length ? `: ${words.join(", ")}` : ""}.`;
  }

  // Why nothing can be said of a part.
  function doubt(part, answer) {
    const [again, really, did] = part === "wait_ms" ? ["waits", "waited", "delayed"] : ["runs", "ran", "slowed"];
    const { measured, simulated } = answer[part];
    return `Simulated, it ${again} ${time(simulated)}, but it really ${really} ${time(measured)}, so who ${did} it cannot be told.`;
  }

  function linesOf(answer, numbers) {
    const off = ({ measured, simulated }) => Math.abs(simulated - measured);
    if (!answer.trusted) return [doubt(off(answer.wait_ms) >= off(answer.run_ms) ? "wait_ms" : "run_ms", answer)];
    const parts = [["waited", "wait_ms"], ["ran", "run_ms"]].map(([verb, part]) =>
      answer[part].trusted ? sentence(verb, part, answer, numbers) : doubt(part, answer));
    return [...parts, ...(answer.program?.trusted ? [programOf(answer.program, numbers)] : []), basis(answer)];
  }

  // Which other programs delayed the one of the request, and which of its calls.
  function programOf({ name, calls, simulated_ms: took, alone_ms: alone, others }, numbers) {
    const words = others.slice(0, SHOWN).filter((other) => Math.abs(other.ms) >= LEAST * took).map((other) => {
      const who = other.program ? `program ${other.program}` : called(other.id, numbers);
      return `${time(other.ms)} because of ${who} (${called(other.call, numbers)} by ${time(other.call_ms)})`;
    });
    return `With it, program ${name} took ${time(took)} for ${counted(calls, "call")}: ${[`${time(alone)} even alone`, ...words].join(", ")}.`;
  }

  function basis({ latency_ms: { measured, simulated }, left_out: out, cost: { scaled_by: factor } }) {
    const off = Math.abs(100 * (simulated / measured - 1)).toFixed(1);
    const without = "Simulated once without each of the requests that were in the server with it";
    const most = out ? `, except for ${counted(out, "other")}` : "";
    const change = Math.abs(100 * (factor - 1)).toFixed(1);
    const scaled = factor ? ` All steps were simulated ${change} % ${factor > 1 ? "longer" : "shorter"}, as they really took.` : "";
    return `${without}${most}. Its simulated latency is ${off} % ${simulated < measured ? "below" : "above"} the measured one.${scaled}`;
  }

  // A button that asks at `url`, and in its place the answer.
  function blameAt(url, numbers, headers) {
    const box = element("div", "blame");
    const button = box.appendChild(element("button", "", "Which requests delayed it?"));
    button.type = "button";
    button.onclick = async () => {
      button.disabled = true;
      box.querySelector(".error")?.remove();
      try {
        const reply = await fetch(url, { headers: headers({}) });
        if (!reply.ok) throw await EB.refusal(reply);
        const answer = await reply.json();
        const lines = linesOf(answer, numbers);
        box.replaceChildren(element("h3", "", "Which requests delayed it"), ...lines.map((line) => element("p", "", line)));
      } catch (error) {
        box.append(element("p", "error", error.status ? error.message : "the server cannot be reached"));
        button.disabled = false;
      }
    };
    return box;
  }

  Object.assign(EB, { blameAt });
})(globalThis);
