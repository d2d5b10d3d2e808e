// Before the first paint, so that nothing flashes: the colours that were chosen on this machine, if any.
"use strict";
try {
  const chosen = localStorage.getItem("sash-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage is off: as the system says.
}
