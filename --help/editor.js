// A text area with line numbers, in which Tab and Enter indent. It knows no Python and no page but its two elements.
"use strict";
(function (root) {
  const EB = (root.EB = root.EB || {});
  const INDENT = "    ";

  class Editor {
    // `changed` is called when the reader edits the text.
    constructor(area, lines, changed) {
      Object.assign(this, { area, lines, changed, marked: 0, leaves: false });
      area.addEventListener("input", () => {
        this.mark(0);
        this.changed();
      });
      area.addEventListener("scroll", () => (lines.scrollTop = area.scrollTop));
      area.addEventListener("keydown", (event) => this.press(event));
    }

    get text() {
      return this.area.value;
    }

    show(text, readOnly) {
      this.area.value = text;
      this.area.readOnly = readOnly;
      this.area.scrollTop = 0;
      this.mark(0);
    }

    // Mark a line as wrong, and bring it into view; 0 marks none.
    mark(line) {
      this.marked = line;
      const count = this.text.split("\n").length;
      this.lines.replaceChildren(...Array.from({ length: count }, (_, k) =>
        EB.element("span", k + 1 === line ? "wrong" : "", `${k + 1}\n`)));
      this.lines.scrollTop = this.area.scrollTop;
      if (!line) return;
      const height = this.area.scrollHeight / count;
      if (line * height > this.area.scrollTop + this.area.clientHeight || line * height < this.area.scrollTop + height) {
        this.area.scrollTop = Math.max(0, (line - 4) * height);
      }
    }

    press(event) {
      if (event.key === "Escape") this.leaves = true; // so that the keyboard gets out of the text
      else if (event.key !== "Tab" && event.key !== "Shift") this.leaves = false;
      if (this.area.readOnly || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "Tab" && !this.leaves) this.indent(event);
      if (event.key === "Enter") this.breakLine(event);
    }

    // Indent, or with Shift outdent, the lines of the selection; without one, insert spaces.
    indent(event) {
      event.preventDefault();
      const { area } = this;
      const { selectionStart: from, selectionEnd: to } = area;
      if (from === to && !event.shiftKey) {
        this.insert(INDENT);
        return;
      }
      const start = area.value.lastIndexOf("\n", from - 1) + 1;
      const before = area.value.slice(start, to);
      const after = event.shiftKey ? before.replace(/^ {1,4}/gm, "") : before.replace(/^(?=.)/gm, INDENT);
      area.setSelectionRange(start, to);
      this.insert(after);
      if (from !== to) area.setSelectionRange(start, start + after.length);
    }

    // A new line begins where the last one did, and deeper after a colon.
    breakLine(event) {
      event.preventDefault();
      const { value, selectionStart } = this.area;
      const line = value.slice(value.lastIndexOf("\n", selectionStart - 1) + 1, selectionStart);
      this.insert("\n" + /^ */.exec(line)[0] + (/:\s*(#.*)?$/.test(line) ? INDENT : ""));
    }

    // Put text in place of the selection, in a way that can be undone.
    insert(text) {
      if (!document.execCommand("insertText", false, text)) {
        this.area.setRangeText(text, this.area.selectionStart, this.area.selectionEnd, "end");
        this.area.dispatchEvent(new Event("input"));
      }
    }
  }

  Object.assign(EB, { Editor });
})(globalThis);
