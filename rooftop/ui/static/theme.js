// The theme that was chosen here before is set before anything is drawn; without one the system's is followed.
(() => {
  let chosen = null;
  try { chosen = localStorage.getItem("theme"); } catch { /* storage may be off: then the system's theme it is */ }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
