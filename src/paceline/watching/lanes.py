"""The lanes of the last minute for a page: spans as they were, or, of very many, the kinds that prevailed."""

from __future__ import annotations

from paceline.report.worker_spans import WorkerTimeline

MOST = 240
"""So many spans of a lane are shown as they are; of more, as many slots with what prevailed in each."""

Drawn = list[tuple[str, float, float]]


def drawn(lanes: list[WorkerTimeline], since: float, now: float) -> Drawn:
    """Returns what one rank did from `since` to `now`, in the lanes of its incarnations."""
    spans: Drawn = []
    for lane, after in zip(lanes, [*lanes[1:], None], strict=True):
        spans += [(span.kind, max(span.start_s, since), span.end_s) for span in lane.spans if span.end_s > since]
        if lane.end_s is None:
            kind = "compute" if lane.computing else "wait" if lane.parked else "pull"
            if now > lane.since_s:
                spans.append((kind, max(lane.since_s, since), now))
        else:
            until = now if after is None else min(now, after.start_s)
            if until > max(lane.end_s, since):
                spans.append(("dead", max(lane.end_s, since), until))
    spans = [(kind, start, min(end, now)) for kind, start, end in spans if start < now]
    return [(kind, round(start, 3), round(end, 3)) for kind, start, end in slots(spans, since, now)]


def slots(spans: Drawn, since: float, now: float) -> Drawn:
    """Returns the spans, or what prevailed in each of `MOST` slots of time if there are more than that."""
    if len(spans) <= MOST or now <= since:
        return spans
    width = (now - since) / MOST
    shares: list[dict[str, float]] = [{} for _ in range(MOST)]
    for kind, start, end in spans:
        for slot in range(int((start - since) / width), min(MOST - 1, int((end - since) / width)) + 1):
            begin = since + slot * width
            if (part := min(end, begin + width) - max(start, begin)) > 0:
                shares[slot][kind] = shares[slot].get(kind, 0.0) + part
    out: Drawn = []
    for slot, share in enumerate(shares):
        if not share:
            continue
        kind = max(share, key=lambda each: share[each])
        begin = since + slot * width
        if out and out[-1][0] == kind and abs(out[-1][2] - begin) < width / 2:
            out[-1] = (kind, out[-1][1], begin + width)
        else:
            out.append((kind, begin, begin + width))
    return out
