// Sets the theme before anything is painted, so that nothing flashes.
(() => {
  let chosen = null;
  try { chosen = localStorage.getItem("duly.theme"); } catch { /* storage is forbidden */ }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
