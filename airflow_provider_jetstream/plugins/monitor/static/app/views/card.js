/** The card on Airflow's dashboard: all queues in five numbers, and the way to the page. */

import { getSnapshot } from "../api.js";
import { AirflowLink, pageAddress } from "../airflow.js";
import { html, useEffect } from "../html.js";
import { Loading, ServerState, Stale } from "../parts.js";
import { usePoll } from "../polling.js";
import { useMe } from "../session.js";
import { Tiles } from "./tiles.js";

/** As high as it is, since a frame doesn't grow by itself. */
function useFullHeight() {
  useEffect(() => {
    const frame = window.frameElement;
    if (!frame) return undefined;
    const app = document.getElementById("app");
    const observer = new ResizeObserver(() => {
      frame.style.height = `${app.offsetHeight}px`;
    });
    observer.observe(app);
    return () => observer.disconnect();
  }, []);
}

/** What the frame on the dashboard shows. */
export function CardView() {
  const me = useMe();
  const poll = usePoll(getSnapshot, me.refresh_seconds, "snapshot");
  useFullHeight();
  const connections = poll.data?.connections ?? [];
  return html`
    <h2 class="title"><${AirflowLink} to=${pageAddress}>JetStream<//></h2>
    <${Stale} poll=${poll} />
    ${connections.map(
      (each) => html`<${ServerState} key=${each.connection} connection=${each.connection} state=${each.state}
        problem=${each.problem} age=${each.queues.length ? each.age_seconds : null} />`,
    )}
    ${!poll.data && !poll.error && html`<${Loading} what="the queues" rows=${2} />`}
    ${poll.data && html`<${Tiles} queues=${connections.flatMap((each) => each.queues)} />`}
  `;
}
