/** The rendering library: Preact with htm, without a build step; only this module imports it. */

import { Component, createContext, h, render } from "../vendor/preact.js";
import htm from "../vendor/htm.js";

export { useContext, useEffect, useLayoutEffect, useMemo, useRef, useState } from "../vendor/preact-hooks.js";
export { Component, createContext, render };

export const html = htm.bind(h);
