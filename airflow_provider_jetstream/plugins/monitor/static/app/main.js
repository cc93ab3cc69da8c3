/** Starts the page. */

import { App } from "./app.js";
import { html, render } from "./html.js";
import { startRouting } from "./routing.js";
import { startTheme } from "./theme.js";

startTheme();
startRouting();
render(html`<${App} />`, document.getElementById("app"));
