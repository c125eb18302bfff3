// Which chunks are read: by what the server did, or by what it would do with another share. Pure.

const overlap = (start, end, [from, to]) => Math.max(0, Math.min(end, to) - Math.max(start, from));

/** Tokens of each chunk that lie in the spans, which are ascending and apart. */
export function readTokens(chunks, spans) {
  let at = 0;
  return chunks.map(({ start, end }) => {
    while (at < spans.length && spans[at][1] <= start) at += 1;
    let read = 0;
    for (let span = at; span < spans.length && spans[span][0] < end; span += 1) read += overlap(start, end, spans[span]);
    return read;
  });
}

/** Overlapping [start, end) ranges as ascending ones that are apart. */
export function union(ranges) {
  const apart = [];
  for (const [start, end] of ranges.toSorted(([one], [other]) => one - other)) {
    const last = apart.at(-1);
    if (last && start <= last[1]) last[1] = Math.max(last[1], end);
    else apart.push([start, end]);
  }
  return apart;
}

/**
 * Tokens of each chunk that a share of `percent` whole percent would keep: the server's rule. So many chunks, the best
 * scores first, ties to the earlier one; those kept anyway count, but half of the chunks at least go by score.
 */
export function whatIf({ chunks, forced }, percent) {
  const anyway = readTokens(chunks, union(forced.map(({ start, end }) => [start, end])));
  const whole = chunks.filter((chunk) => chunk.forced).length;
  const budget = Math.ceil((chunks.length * percent) / 100);
  const wanted = Math.min(Math.max(budget - whole, Math.ceil(budget / 2)), chunks.length - whole);
  const open = chunks.map((_, index) => index).filter((index) => !chunks[index].forced);
  open.sort((one, other) => chunks[other].score - chunks[one].score || one - other);
  for (const index of open.slice(0, wanted)) anyway[index] = chunks[index].end - chunks[index].start;
  return anyway;
}
