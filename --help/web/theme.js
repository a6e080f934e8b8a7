// Light or dark as the reader chose last, before anything is drawn.
"use strict";
try {
  const theme = localStorage.getItem("eb-theme");
  if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
} catch {
  // storage is forbidden: the system's choice stays
}
