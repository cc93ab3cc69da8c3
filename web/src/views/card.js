/** The card on Airflow's dashboard: all queues in five numbers, and a link to the page. */

import { getSnapshot } from "../api.js";
import { AirflowLink, pageAddress } from "../airflow.js";
import { html, useEffect } from "../html.js";
import { Loading, ServerState, PollError } from "../components.js";
import { usePoll } from "../polling.js";
import { useMe } from "../session.js";
import { Tiles } from "./tiles.js";

/** Set the frame's height to that of its content, since a frame doesn't grow automatically. */
function useFullHeight() {
  useEffect(() => {
    const frame = /** @type {HTMLElement | null} */ (window.frameElement);
    const app = document.getElementById("app");
    if (!frame || !app) return undefined;
    const observer = new ResizeObserver(() => {
      frame.style.height = `${app.offsetHeight}px`;
    });
    observer.observe(app);
    return () => observer.disconnect();
  }, []);
}

/** The content of the frame on the dashboard. */
export function CardView() {
  const me = useMe();
  const poll = usePoll(getSnapshot, me.refresh_seconds, "snapshot");
  useFullHeight();
  const connections = poll.data?.connections ?? [];
  return html`
    <h2 class="title"><${AirflowLink} to=${pageAddress}>JetStream<//></h2>
    <${PollError} poll=${poll} />
    ${connections.map(
      (item) => html`<${ServerState} key=${item.connection} connection=${item.connection} state=${item.state}
        problem=${item.problem} age=${item.queues.length ? item.age_seconds : null} />`,
    )}
    ${!poll.data && !poll.error && html`<${Loading} what="the queues" rows=${2} />`}
    ${poll.data && html`<${Tiles} queues=${connections.flatMap((item) => item.queues)} />`}
  `;
}
