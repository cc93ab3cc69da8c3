/** The rendering library: Preact with htm's templates; only this module imports it. */

import htm from "htm";
import { Component, createContext, h, render } from "preact";

export { useContext, useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
export { Component, createContext, render };

export const html = htm.bind(h);
