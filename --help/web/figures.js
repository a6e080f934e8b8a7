// Numbers as text: the same digits, units and thousands separator everywhere on the pages.
"use strict";
(function (root) {
  const EB = (root.EB = root.EB || {});

  // A whole number, such as 12,345.
  function count(value) {
    return Math.round(value).toLocaleString("en");
  }

  // A number of things, such as 1 token or 2 tokens.
  function counted(value, noun) {
    return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
  }

  // Seconds with three digits and a unit; a dash where there is no value.
  function seconds(value) {
    if (value === null || value === undefined || !Number.isFinite(value)) return "–";
    if (value >= 100) return `${count(value)} s`;
    if (value >= 10) return `${value.toFixed(1)} s`;
    if (value >= 1) return `${value.toFixed(2)} s`;
    if (value >= 0.01) return `${(value * 1000).toFixed(0)} ms`;
    return `${(value * 1000).toFixed(1)} ms`;
  }

  function percent(share) {
    return `${Math.round(share * 100)} %`;
  }

  // A rate with about three digits.
  function figure(value) {
    return value >= 100 ? count(value) : value.toFixed(value ? 1 : 0);
  }

  Object.assign(EB, { count, counted, seconds, percent, figure });
})(globalThis);
