// Asks for the list of runs every two seconds; ticked boxes stay ticked. The server has escaped all text.
async function refresh() {
  const state = document.getElementById("live-state");
  try {
    const { main } = await (await fetch("/rows")).json();
    const ticked = new Set([...document.querySelectorAll("input[name=run]:checked")].map(({ value }) => value));
    const top = scrollY;
    document.querySelector("main").replaceChildren(...new DOMParser().parseFromString(main, "text/html").body.childNodes);
    for (const box of document.querySelectorAll("input[name=run]")) box.checked = ticked.has(box.value);
    scrollTo(0, top);
    state.textContent = `updated ${new Date().toLocaleTimeString()}`;
  } catch {
    state.textContent = "The server does not answer.";
  }
  setTimeout(refresh, 2000);
}
setTimeout(refresh, 2000);
