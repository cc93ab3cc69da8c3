/** Light and dark as Airflow has it; as the system has it where the page is opened by itself. */

import { host } from "./airflow.js";

const root = document.documentElement;
/** What a deployment's own theme may have changed, and what it is called here. */
const TOKENS = {
  "--chakra-colors-bg": "--bg",
  "--chakra-colors-fg": "--fg",
  "--chakra-colors-fg-muted": "--fg-muted",
  "--chakra-colors-brand-solid": "--accent",
  "--chakra-colors-brand-contrast": "--on-accent",
};
const listeners = new Set();

/** Call back whenever colours have changed, for what isn't drawn by CSS. */
export function onTheme(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** @returns {string} the colour that a custom property stands for, as a canvas takes it */
export function colour(name) {
  const probe = document.createElement("i");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

function follow() {
  const theirs = host.document.documentElement;
  const style = host.getComputedStyle(theirs);
  root.classList.toggle("dark", theirs.classList.contains("dark"));
  root.classList.toggle("light", !theirs.classList.contains("dark"));
  for (const [token, own] of Object.entries(TOKENS)) {
    const value = style.getPropertyValue(token).trim();
    if (value) root.style.setProperty(own, value);
    else root.style.removeProperty(own);
  }
  tell();
}

function tell() {
  for (const listener of listeners) listener();
}

/** Follow the theme from now on. */
export function startTheme() {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", tell);
  if (!host) return;
  follow();
  new MutationObserver(follow).observe(host.document.documentElement, { attributeFilter: ["class", "style"] });
}
