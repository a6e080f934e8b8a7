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

  // One part of a request's time, the worst culprit first; `numbers` has the requests' numbers on this page by id.
  function sentence(verb, part, answer, numbers) {
    const { simulated, alone, residual } = answer[part];
    const others = answer.others.filter((other) => other[part]).sort((a, b) => b[part] - a[part]);
    const worst = others.slice(0, SHOWN).filter((other) => Math.abs(other[part]) >= LEAST * simulated);
    const words = worst.map((other) => {
      const who = numbers.has(other.id) ? `#${numbers.get(other.id)}` : other.id.slice(0, 8);
      return `${time(other[part])} because of ${who}${other.client && ` (${other.client})`}`;
    });
    const more = others.slice(worst.length);
    if (more.length) words.push(`${time(more.reduce((sum, other) => sum + other[part], 0))} because of ${counted(more.length, "other")}`);
    if (alone) words.unshift(`${time(alone)} even alone`);
    if (residual <= -0.05) words.push(`less ${time(-residual)} that these count more than once`);
    if (residual >= 0.05) words.push(`${time(residual)} that no single request explains`);
    return `It ${verb} ${time(simulated)}${words.length ? `: ${words.join(", ")}` : ""}.`;
  }

  function basis({ latency_ms: { measured, simulated }, left_out: out }) {
    const off = Math.abs(100 * (simulated / measured - 1)).toFixed(1);
    const without = "Simulated once without each of the requests that were in the server with it";
    const most = out ? `, except for ${counted(out, "other")}` : "";
    return `${without}${most}. Its simulated latency is ${off} % ${simulated < measured ? "below" : "above"} the measured one.`;
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
        const lines = [sentence("waited", "wait_ms", answer, numbers), sentence("ran", "run_ms", answer, numbers), basis(answer)];
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
