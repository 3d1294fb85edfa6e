// Keeps an open page as the fleet is. Without it a page shows what was so when it was loaded.
"use strict";

(() => {
  const state = document.querySelector("[data-events]");
  const live = document.getElementById("live");
  if (!state || !live || !window.EventSource) return;
  const LOST = "Connection lost, trying again", AGAIN_MS = 3000;
  let source = null, timer = null;

  // Only what differs is touched: the focus, an open list and a place scrolled to stay.
  // A link never becomes another one, and a row is that of its first link, wherever it moves:
  // whoever presses one while the list changes gets that one or none.
  const link = (node) => node?.getAttribute("href") || "";
  const key = (node) => node.id || (node.nodeName === "A" ? link(node)
    : node.nodeName === "TR" ? link(node.querySelector("a")) : "");
  const same = (a, b) => a.nodeType === b.nodeType && a.nodeName === b.nodeName
    && key(a) === key(b);

  const become = (old, now) => {
    if (old.nodeType !== Node.ELEMENT_NODE) {
      if (old.nodeValue !== now.nodeValue) old.nodeValue = now.nodeValue;
      return;
    }
    for (const each of [...old.attributes]) {
      if (!now.hasAttribute(each.name) && !(old.nodeName === "DETAILS" && each.name === "open")) {
        old.removeAttribute(each.name);
      }
    }
    for (const each of now.attributes) {
      if (old.getAttribute(each.name) !== each.value) old.setAttribute(each.name, each.value);
    }
    children(old, now);
  };

  const children = (old, now) => {
    const wanted = [...now.childNodes], kept = new Set(wanted.map(key));
    for (const each of [...old.childNodes]) if (!kept.has(key(each))) old.removeChild(each);
    wanted.forEach((each, place) => {
      const there = old.childNodes[place];
      if (there && same(there, each)) {
        become(there, each);
        return;
      }
      const moved = key(each) && [...old.childNodes].slice(place).find((one) => same(one, each));
      if (moved) {
        // What is moved loses the focus: what has no name of its own makes room.
        while (!key(old.childNodes[place])) old.removeChild(old.childNodes[place]);
        if (old.childNodes[place] !== moved) old.insertBefore(moved, old.childNodes[place]);
        become(moved, each);
      }
      else if (there && !key(there)) old.replaceChild(each, there);
      else old.insertBefore(each, there || null);
    });
    while (old.childNodes.length > wanted.length) old.removeChild(old.lastChild);
  };

  const say = (text, lost) => {
    if (state.textContent !== text) state.textContent = text;
    state.classList.toggle("lost", lost);
  };

  const close = () => {
    clearTimeout(timer);
    if (source) source.close();
    source = null;
  };

  const open = () => {
    close();
    source = new EventSource(state.dataset.events);
    source.onopen = () => say("Live", false);
    source.addEventListener("fragment", (event) => {
      say("Live", false);
      const page = new DOMParser().parseFromString(event.data, "text/html");
      children(live, page.body);
    });
    source.onerror = () => {
      say(LOST, true);
      close();
      timer = setTimeout(retry, AGAIN_MS);
    };
  };

  // A session may have ended meanwhile: then the page is loaded again, which asks who is there.
  const retry = async () => {
    try {
      const answer = await fetch("/alive", { redirect: "manual", cache: "no-store" });
      if (answer.status === 401) location.reload();
      else open();
    } catch {
      timer = setTimeout(retry, AGAIN_MS);
    }
  };

  // A browser has few connections to one host: a page that nobody looks at needs none.
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  window.addEventListener("pagehide", close);
  if (!document.hidden) open();
})();
