// The box with the turns of the prompt box. It shows texts as text nodes, and for a token under the pointer, or chosen with
// the arrow keys, what else the model might have said.
"use strict";
(function (root) {
  const EB = (root.EB = root.EB || {});
  const { element } = EB;

  // One token or more, with the log probabilities of a streamed piece, in one form for both of OpenAI's routes:
  // [{ token, logprob, top: [{ token, logprob }] }].
  function scoresOf(choice) {
    const scores = choice.logprobs;
    if (scores?.content) return scores.content.map((one) => ({ token: one.token, logprob: one.logprob, top: one.top_logprobs }));
    if (!scores?.tokens) return [];
    return scores.tokens.map((token, k) => ({
      token, logprob: scores.token_logprobs[k],
      top: Object.entries(scores.top_logprobs[k] ?? {}).map(([name, logprob]) => ({ token: name, logprob })),
    }));
  }

  function visible(token) {
    return token.replace(/\n/g, "↵").replace(/ /g, "␣");
  }

  class Answer {
    constructor(box, card) {
      this.box = box;
      this.card = card; // the alternatives of the active token
      this.scores = new WeakMap(); // by the element of their text
      this.active = null;
      box.addEventListener("pointerover", (event) => this.activate(event.target.closest(".token")));
      box.addEventListener("pointerleave", () => this.activate(null));
      box.addEventListener("click", (event) => this.activate(event.target.closest(".token")));
      box.addEventListener("blur", () => this.activate(null));
      box.addEventListener("scroll", () => this.activate(null));
      box.addEventListener("keydown", (event) => this.move(event));
    }

    clear() {
      this.activate(null);
      this.box.replaceChildren();
      this.box.classList.remove("none");
    }

    // Begin a text to which `add` appends: a turn of a chat (user, model), or a prompt and the rest of its line.
    begin(kind) {
      this.turn = this.box.appendChild(element(kind === "user" || kind === "model" ? "div" : "span", kind));
      return this.turn;
    }

    add(text, scores = []) {
      const atEnd = this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 30;
      let at = 0;
      let parts = scores.map((one) => {
        const part = text.startsWith(one.token, at) ? one.token : ""; // as of a token that ends the answer
        at += part.length;
        return [part, [one]];
      });
      // A piece can hold back or drop a part of its tokens' text, as at a stop string; then its tokens share one element.
      if (at < text.length) parts = [[text, scores]];
      for (const [part, known] of parts) {
        if (!part && !known.length) continue;
        const span = this.turn.appendChild(element("span", known.length ? "token" : "", part));
        if (known.length) this.scores.set(span, known);
      }
      if (atEnd) this.toEnd();
    }

    // Show a piece of what the model thinks before it answers.
    think(text) {
      const last = this.turn.lastElementChild;
      const place = last?.className === "thought" ? last : this.turn.appendChild(element("p", "thought", ""));
      place.append(text);
      this.toEnd();
    }

    toEnd() {
      this.box.scrollTop = this.box.scrollHeight;
    }

    move(event) {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      const tokens = by ? [...this.box.querySelectorAll(".token")] : [];
      if (!tokens.length) return;
      event.preventDefault();
      event.stopPropagation();
      const from = this.active ? tokens.indexOf(this.active) : by > 0 ? -1 : tokens.length;
      const next = tokens[Math.max(0, Math.min(tokens.length - 1, from + by))];
      next.scrollIntoView({ block: "nearest" });
      this.activate(next);
    }

    activate(token) {
      if (token === this.active) return;
      this.active?.classList.remove("active");
      this.active = token;
      this.card.hidden = !token;
      if (!token) return;
      token.classList.add("active");
      this.card.replaceChildren(...this.scores.get(token).slice(0, 3).map(alternatives));
      const at = token.getBoundingClientRect(), around = this.card.offsetParent.getBoundingClientRect();
      const left = Math.min(at.left - around.left, around.width - this.card.offsetWidth - 8);
      this.card.style.left = `${Math.max(8, left)}px`;
      this.card.style.top = `${at.bottom - around.top + 4}px`;
    }
  }

  // A list of what the model might have said instead of a token, the likeliest first.
  function alternatives({ token, logprob, top }) {
    const list = element("ol");
    const known = top.some((one) => one.token === token) ? top : [...top, { token, logprob }];
    for (const one of [...known].sort((a, b) => b.logprob - a.logprob)) {
      const row = list.appendChild(element("li", one.token === token ? "taken" : ""));
      const share = Math.exp(one.logprob);
      row.append(element("code", "", visible(one.token)), element("b", "", `${(100 * share).toFixed(1)} %`));
      const bar = row.appendChild(element("span")).appendChild(element("i"));
      bar.style.transform = `scaleX(${Math.min(1, share)})`;
    }
    return list;
  }

  Object.assign(EB, { Answer, scoresOf });
})(globalThis);
