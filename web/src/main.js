/** Starts the page; `mount` shows one view as a part of Airflow's own page. */

import { App } from "./app.js";
import { followInAirflow } from "./airflow.js";
import { html, render } from "./html.js";
import { base, embed } from "./place.js";
import { showOnly, startRouting } from "./routing.js";
import { followTheme } from "./theme.js";

/**
 * Show a view in an element of Airflow's page.
 *
 * @param {HTMLElement} element gets a shadow root, so that neither page's styles reach the other
 * @param {string} address of the view, such as `#/jobs?dag_id=…`
 * @returns {() => void} removes it
 */
export function mount(element, address) {
  const root = element.shadowRoot ?? element.attachShadow({ mode: "open" });
  const style = document.createElement("link");
  style.rel = "stylesheet";
  style.href = new URL(`static/${STYLE_NAME}`, base).href;
  const app = document.createElement("div");
  app.id = "app";
  root.replaceChildren(style, app);
  embed();
  app.addEventListener("click", followInAirflow);
  const stopTheme = followTheme(element, window);
  showOnly(address);
  render(html`<${App} />`, app);
  return () => {
    render(null, app);
    stopTheme();
  };
}

const own = document.querySelector('#app[data-page="jetstream"]');
if (own) {
  followTheme(document.documentElement);
  startRouting();
  render(html`<${App} />`, own);
}
