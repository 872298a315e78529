// Follows a run: asks for its version every second, and when it has grown, for its content.
async function follow() {
  const state = byId("live-state");
  try {
    const { version } = await (await fetch(`/version/${encodeURI(run)}`)).json();
    if (version !== shownVersion) {
      const answer = await fetch(`/content/${encodeURI(run)}?have=${encodeURIComponent(shownVersion)}`);
      if (answer.status === 202) {
        state.textContent = "The run has grown; its new page is being made.";
      } else if (answer.ok) {
        const content = await answer.json();
        showContent(content);
        shownVersion = content.version;
        state.textContent = `updated ${new Date().toLocaleTimeString()}`;
      } else {
        state.textContent = "The run cannot be read at the moment.";
      }
    }
  } catch {
    state.textContent = "The server does not answer.";
  }
  setTimeout(follow, 1000);
}

// The server has escaped all text in `main`; scripts in it would not run.
function showContent({ main, page }) {
  const slider = byId("glass-step");
  const chosen = slider && slider.value !== slider.max ? slider.value : null;
  const top = scrollY;
  document.querySelector("main").replaceChildren(...new DOMParser().parseFromString(main, "text/html").body.childNodes);
  drawPage(page);
  if (chosen !== null && byId("glass-step")) {
    byId("glass-step").value = chosen;
    byId("glass-step").oninput();
  }
  scrollTo(0, top);
}
follow();
