-- name: admit
-- Insert if absent; the number of changed rows says whether it was fresh.
INSERT OR IGNORE INTO messages
    (key, fingerprint, kind, recipient, state, until, accepted_at, moved_at, time, expires, position, body, listed)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: known
-- What a repeat needs to be told.
SELECT fingerprint, state, answer FROM messages WHERE key = ?;

-- name: find
SELECT key, kind, recipient, body, time, expires, position, state, answer, until, accepted_at, moved_at
FROM messages WHERE key = ?;

-- name: key_below
-- Where a page that looks at so many messages ends.
SELECT key FROM messages WHERE key < ? ORDER BY key DESC LIMIT 1 OFFSET ?;

-- name: between
SELECT key, kind, recipient, body, time, expires, position, state, answer, until, accepted_at, moved_at
FROM messages
WHERE key >= ?1 AND key < ?2 AND (?3 IS NULL OR substr(key, 7, length(?3)) = ?3) AND (NOT ?4 OR state < 10)
ORDER BY key DESC LIMIT ?5;

-- name: of_kind
-- Listed messages of a kind, the newest first.
SELECT key, kind, recipient, body, time, expires, position, state, answer, until, accepted_at, moved_at
FROM messages WHERE kind = ? AND listed = 1 AND (accepted_at, key) < (?, ?)
ORDER BY accepted_at DESC, key DESC LIMIT ?;

-- name: aged
-- Up to so many listed messages, however many deliveries they have.
SELECT m.accepted_at, m.key,
       d.key, d.channel, d.recipient, d.round, d.state, d.attempt, d.due, d.expires, d.worker, d.error,
       d.kind, d.in_doubt
FROM (
    SELECT accepted_at, key, state FROM messages
    WHERE kind = ? AND listed = 1 AND (accepted_at, key) > (?, ?) AND accepted_at < ?
    ORDER BY accepted_at, key LIMIT ?
) AS m LEFT JOIN deliveries AS d ON d.key = m.key AND m.state >= 10 AND d.state >= 10
ORDER BY m.accepted_at, m.key, d.channel, d.recipient, d.round;

-- name: forget_ended_deliveries
-- As a JSON array of [key in hex, channel, recipient, round].
DELETE FROM deliveries WHERE state >= 10 AND (key, channel, recipient, round) IN (
    SELECT unhex(value ->> 0), value ->> 1, value ->> 2, value ->> 3 FROM json_each(?)
)
RETURNING 1;

-- name: withdraw
DELETE FROM messages WHERE key = ? AND state < 10;

-- name: state
SELECT state, answer FROM messages WHERE key = ?;

-- name: advance
-- Compare-and-set: the state must still be the one that was read.
UPDATE messages SET state = ?, answer = ?, moved_at = ? WHERE key = ? AND state = ?;

-- name: advance_all
-- Compare-and-set of many; the row is repeated.
UPDATE messages SET state = v.column2, answer = v.column3, moved_at = v.column4
FROM (VALUES (?, ?, ?, ?)) AS v
WHERE messages.key = v.column1 AND messages.state IN (:sources);

-- name: deliver
INSERT OR IGNORE INTO deliveries
    (key, channel, recipient, round, state, attempt, due, expires, worker, kind, error)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, '');

-- name: take
-- The next attempt, fenced by the number of the last.
UPDATE deliveries SET state = 1, attempt = attempt + 1, worker = ?, due = ?
WHERE key = ? AND channel = ? AND recipient = ? AND round = ? AND attempt = ? AND state < 10;

-- name: renew
UPDATE deliveries SET due = ?
WHERE key = ? AND channel = ? AND recipient = ? AND round = ? AND attempt = ? AND state < 10;

-- name: postpone
UPDATE deliveries SET state = 0, due = ?, error = ?, in_doubt = ?, worker = ''
WHERE key = ? AND channel = ? AND recipient = ? AND round = ? AND attempt = ? AND state < 10;

-- name: finish
-- NULL for the attempt accepts the end of any.
UPDATE deliveries SET state = ?, error = ?, worker = ''
WHERE key = ? AND channel = ? AND recipient = ? AND round = ? AND attempt = coalesce(?, attempt) AND state < 10;

-- name: finish_all
-- The same of many. The plus keeps SQLite from walking over all that is open instead of these.
UPDATE deliveries SET state = v.column5, error = v.column6, worker = ''
FROM (VALUES (?, ?, ?, ?, ?, ?, ?)) AS v
WHERE deliveries.key = v.column1 AND deliveries.channel = v.column2 AND deliveries.recipient = v.column3
    AND deliveries.round = v.column4 AND deliveries.attempt = coalesce(v.column7, deliveries.attempt)
    AND +deliveries.state < 10;

-- name: due
SELECT key, channel, recipient, round, state, attempt, due, expires, worker, error, kind, in_doubt
FROM deliveries
WHERE channel = ? AND state < 10 AND due <= ? ORDER BY due, key, recipient, round LIMIT ?;

-- name: deliveries
SELECT key, channel, recipient, round, state, attempt, due, expires, worker, error, kind, in_doubt
FROM deliveries
WHERE key = ? ORDER BY channel, recipient, round;

-- name: open
-- What a restart goes on with.
SELECT m.key, m.kind, m.recipient, m.body, m.time, m.expires, m.position, m.state,
       d.key, d.channel, d.recipient, d.round, d.state, d.attempt, d.due, d.expires, d.worker, d.error,
       d.kind, d.in_doubt
FROM deliveries AS d JOIN messages AS m ON m.key = d.key
WHERE d.channel = ? AND d.state < 10 ORDER BY m.accepted_at, m.key, d.recipient, d.round;

-- name: drop_deliveries
DELETE FROM deliveries WHERE key = ?;

-- name: next_number
INSERT INTO streams (stream, last) VALUES (?, 1)
ON CONFLICT (stream) DO UPDATE SET last = last + 1 RETURNING last;

-- name: append
INSERT INTO entries (stream, n, body, at, key) VALUES (?, ?, ?, ?, ?);

-- name: last
SELECT last FROM streams WHERE stream = ?;

-- name: extend
INSERT INTO streams (stream, last) VALUES (?, ?)
ON CONFLICT (stream) DO UPDATE SET last = excluded.last WHERE excluded.last > last;

-- name: admit_ended
-- Messages whose effect is stored with them.
INSERT OR IGNORE INTO messages
    (key, fingerprint, kind, recipient, state, until, accepted_at, moved_at, time, expires, position, body, listed,
     answer)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: there
-- How many of these items exist, with this body if one is named.
WITH asked (bucket, name, body) AS (VALUES (?, ?, ?))
SELECT count(*) FROM asked JOIN items AS i ON i.bucket = asked.bucket AND i.name = asked.name
WHERE asked.body IS NULL OR i.body = asked.body;

-- name: number
-- A message that was admitted in this transaction is done: its answer is the number of its entry.
UPDATE messages SET state = 10, answer = ?, moved_at = ? WHERE key = ? AND state < 10;

-- name: rewrite
-- What was erased stays so.
UPDATE entries SET body = ? WHERE stream = ? AND n = ? AND body <> x'';

-- name: entries
SELECT n, body, at, key FROM entries WHERE stream = ? AND n > ? ORDER BY n LIMIT ?;

-- name: extent
SELECT (SELECT min(n) FROM entries WHERE stream = ?1), (SELECT last FROM streams WHERE stream = ?1);

-- name: trim
DELETE FROM entries WHERE stream = ? AND n <= ?;

-- name: move_cursor
-- Forward only, and never past the end of the stream.
INSERT INTO cursors (stream, reader, n)
VALUES (?1, ?2, min(?3, coalesce((SELECT last FROM streams WHERE stream = ?1), 0)))
ON CONFLICT (stream, reader) DO UPDATE SET n = max(n, excluded.n) RETURNING n;

-- name: advance_cursors
-- Those that really move.
INSERT INTO cursors (stream, reader, n) VALUES (?, ?, ?)
ON CONFLICT (stream, reader) DO UPDATE SET n = excluded.n WHERE excluded.n > n;

-- name: cursor
SELECT n FROM cursors WHERE stream = ? AND reader = ?;

-- name: cursors
SELECT reader, n FROM cursors WHERE stream = ?;

-- name: standing
SELECT coalesce((SELECT last FROM streams WHERE stream = ?1), 0),
       (SELECT n FROM cursors WHERE stream = ?1 AND reader = ?2);

-- name: raise
-- A higher number, or a later time from a sender that counts anew; see duly.core.operations.is_later.
INSERT INTO marks (mark, n, ms) VALUES (?, ?, ?)
ON CONFLICT (mark) DO UPDATE SET n = excluded.n, ms = max(ms, excluded.ms)
WHERE excluded.n > n OR excluded.ms > ms;

-- name: raise_from
-- The same of many that rise under one mark: the first (n, ms) must be later, the last is what stands then.
INSERT INTO marks (mark, n, ms)
SELECT v.column1, v.column4, v.column5 FROM (VALUES (?, ?, ?, ?, ?)) AS v
LEFT JOIN marks AS old ON old.mark = v.column1
WHERE old.mark IS NULL OR v.column2 > old.n OR v.column3 > old.ms
ON CONFLICT (mark) DO UPDATE SET n = excluded.n, ms = max(ms, excluded.ms);

-- name: marks
SELECT mark, n, ms FROM marks WHERE mark >= ?1 AND mark < ?1 || char(1114111) ORDER BY ms DESC LIMIT 100000;

-- name: put_new
INSERT OR IGNORE INTO items (bucket, name, body) VALUES (?, ?, ?);

-- name: replace
UPDATE items SET body = ? WHERE bucket = ? AND name = ?;

-- name: drop
DELETE FROM items WHERE bucket = ? AND name = ?;

-- name: drop_only
DELETE FROM items WHERE bucket = ? AND name = ? AND body = ?;

-- name: bucket
SELECT name, body FROM items WHERE bucket = ? ORDER BY name;

-- name: item
SELECT body FROM items WHERE bucket = ? AND name = ?;

-- name: refuse
INSERT INTO refusals (scope, id, word, reason, at) VALUES (?, ?, ?, ?, ?);

-- name: forget_refusals
DELETE FROM refusals WHERE n <= (SELECT max(n) FROM refusals) - ?;

-- name: refusals
SELECT scope, id, word, reason, at FROM refusals ORDER BY n DESC LIMIT ?;

-- name: floor
SELECT until, trusted, claim, mended, barrier FROM floor;

-- name: set_floor
UPDATE floor SET until = ?, trusted = ?, claim = ?, mended = ?, barrier = ?;

-- name: hold_floor
-- The same; the writer's transaction keeps everything else out.
SELECT until, trusted, claim, mended, barrier FROM floor;

-- name: forget_deliveries
-- Keys as a JSON array of hex.
DELETE FROM deliveries WHERE key IN (SELECT unhex(value) FROM json_each(?));

-- name: forget
DELETE FROM messages WHERE key IN (SELECT unhex(value) FROM json_each(?));

-- name: prunable
SELECT key, kind, recipient, body, time, expires, position, state, answer, until, accepted_at, moved_at
FROM messages
WHERE until < 4611686018427387903 AND until <= ? AND state >= 10 ORDER BY until, key LIMIT ?;

-- name: prunable_keys
SELECT key FROM messages
WHERE until < 4611686018427387903 AND until <= ? AND state >= 10 ORDER BY until, key LIMIT ?;

-- name: prunable_keys_of
SELECT m.key FROM json_each(?2) AS asked JOIN messages AS m ON m.key = unhex(asked.value)
WHERE m.until <= ?1 AND m.state >= 10;

-- name: size
SELECT (SELECT count(*) FROM messages), (SELECT count(*) FROM deliveries),
       (SELECT page_count FROM pragma_page_count()) * (SELECT page_size FROM pragma_page_size());

-- What the ledger is made of.
-- name: describe
SELECT 'SQLite ' || sqlite_version(), user_version FROM pragma_user_version;
