-- ── the journal ──

-- name: add_to_journal
INSERT INTO journal (n, body) VALUES (?, ?);

-- name: journal
SELECT n, body FROM journal ORDER BY n;

-- name: cut_journal
-- What is in the tables now.
DELETE FROM journal WHERE n <= ?;

-- ── the tables, many rows at a time: the row of VALUES is repeated ──

-- name: insert_messages
INSERT INTO messages
    (key, fingerprint, kind, recipient, until, accepted_at, time, expires, position, body, listed,
     state, moved_at, answer)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: move_messages
UPDATE messages SET state = v.column2, moved_at = v.column3, answer = v.column4
FROM (VALUES (?, ?, ?, ?)) AS v WHERE messages.key = v.column1;

-- name: drop_messages
DELETE FROM messages WHERE key IN (VALUES (?));

-- name: drop_deliveries
DELETE FROM deliveries WHERE key IN (VALUES (?));

-- name: discard_deliveries
DELETE FROM deliveries WHERE (key, channel, recipient, round) IN (VALUES (?, ?, ?, ?));

-- name: put_deliveries
INSERT OR REPLACE INTO deliveries
    (key, channel, recipient, round, kind, state, attempt, due, expires, worker, error, in_doubt)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: insert_entries
INSERT INTO entries (stream, n, body, at, key) VALUES (?, ?, ?, ?, ?);

-- name: rewrite_entries
UPDATE entries SET body = v.column3
FROM (VALUES (?, ?, ?)) AS v WHERE entries.stream = v.column1 AND entries.n = v.column2;

-- name: put_lasts
INSERT OR REPLACE INTO streams (stream, last) VALUES (?, ?);

-- name: put_cursors
INSERT OR REPLACE INTO cursors (stream, reader, n) VALUES (?, ?, ?);

-- name: put_marks
INSERT OR REPLACE INTO marks (mark, n, ms) VALUES (?, ?, ?);

-- name: put_items
INSERT OR REPLACE INTO items (bucket, name, body) VALUES (?, ?, ?);

-- name: drop_items
DELETE FROM items WHERE (bucket, name) IN (VALUES (?, ?));

-- name: insert_refusals
INSERT INTO refusals (scope, id, word, reason, at) VALUES (?, ?, ?, ?, ?);

-- ── single rows, as the interpreter asks for them ──

-- name: message
SELECT key, fingerprint, kind, recipient, until, accepted_at, time, expires, position, body, listed,
       state, moved_at, answer
FROM messages WHERE key = ?;

-- name: messages_of
-- `:keys` stands for many.
SELECT key, fingerprint, kind, recipient, until, accepted_at, time, expires, position, body, listed,
       state, moved_at, answer
FROM messages WHERE key IN (:keys);

-- name: deliveries_of
SELECT key, channel, recipient, round, state, attempt, due, expires, worker, error, kind, in_doubt
FROM deliveries WHERE key IN (:keys);

-- name: top
-- Above every key that is stored.
SELECT max((SELECT coalesce(max(key), x'') FROM messages), (SELECT coalesce(max(key), x'') FROM deliveries));

-- name: mark
SELECT n, ms FROM marks WHERE mark = ?;

-- name: entry_body
SELECT body FROM entries WHERE stream = ? AND n = ?;

-- name: due
SELECT key, channel, recipient, round, state, attempt, due, expires, worker, error, kind, in_doubt
FROM deliveries
WHERE channel = ? AND state < 10 AND due <= ? ORDER BY due, key, recipient, round LIMIT ?;

-- name: last
SELECT last FROM streams WHERE stream = ?;

-- name: cursor
SELECT n FROM cursors WHERE stream = ? AND reader = ?;

-- name: item
SELECT body FROM items WHERE bucket = ? AND name = ?;

-- name: floor
SELECT until, trusted, claim, mended, barrier, restored FROM floor;

-- name: forget_refusals
DELETE FROM refusals WHERE n <= (SELECT max(n) FROM refusals) - ?;

-- ── questions ──

-- name: find
SELECT key, kind, recipient, body, time, expires, position, state, answer, until, accepted_at, moved_at
FROM messages WHERE key = ?;

-- name: key_below
-- Where a page that looks at so many messages ends.
SELECT key FROM messages WHERE key < ? ORDER BY key DESC LIMIT 1 OFFSET ?;

-- name: between
SELECT key, kind, recipient, body, time, expires, position, state, answer, until, accepted_at, moved_at
FROM messages
WHERE key >= ?1 AND key < ?2
    AND (?3 IS NULL OR substr(key, 7, length(?3)) = ?3) AND (?4 IS NULL OR substr(key, -length(?4)) = ?4)
    AND (?5 IS NULL OR recipient = ?5) AND (?6 IS NULL OR kind = ?6) AND (?7 = 0 OR (?7 >> state) & 1)
    AND accepted_at >= ?8 AND accepted_at < ?9
ORDER BY key DESC LIMIT ?10;

-- name: untimed_between
-- Messages whose ids have no time, by when they were accepted.
SELECT key, kind, recipient, body, time, expires, position, state, answer, until, accepted_at, moved_at
FROM messages
WHERE key < x'000000000001'
    AND (accepted_at / 1000, key) >= (?1, ?2) AND (accepted_at / 1000, key) < (?3, ?4)
    AND (?5 IS NULL OR substr(key, 7, length(?5)) = ?5) AND (?6 IS NULL OR substr(key, -length(?6)) = ?6)
    AND (?7 IS NULL OR recipient = ?7) AND (?8 IS NULL OR kind = ?8) AND (?9 = 0 OR (?9 >> state) & 1)
    AND accepted_at >= ?10 AND accepted_at < ?11
ORDER BY accepted_at / 1000 DESC, key DESC LIMIT ?12;

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

-- name: open
-- What a restart goes on with.
SELECT m.key, m.kind, m.recipient, m.body, m.time, m.expires, m.position, m.state, m.accepted_at,
       d.key, d.channel, d.recipient, d.round, d.state, d.attempt, d.due, d.expires, d.worker, d.error,
       d.kind, d.in_doubt
FROM deliveries AS d JOIN messages AS m ON m.key = d.key
WHERE d.channel = ? AND d.state < 10 ORDER BY m.accepted_at, m.key, d.recipient, d.round;

-- name: unheld
SELECT d.recipient, count(*), min(m.accepted_at)
FROM deliveries AS d JOIN messages AS m ON m.key = d.key
WHERE d.channel = ? AND d.state = 0 AND d.worker = ''
GROUP BY d.recipient;

-- name: deliveries
SELECT key, channel, recipient, round, state, attempt, due, expires, worker, error, kind, in_doubt
FROM deliveries
WHERE key = ? ORDER BY channel, recipient, round;

-- name: deliveries_of_all
SELECT key, channel, recipient, round, state, attempt, due, expires, worker, error, kind, in_doubt
FROM deliveries
WHERE key IN (SELECT unhex(value) FROM json_each(?)) ORDER BY key, channel, recipient, round;

-- name: entries
SELECT n, body, at, key FROM entries WHERE stream = ? AND n > ? ORDER BY n LIMIT ?;

-- name: newest_entries
SELECT e.stream, e.n, e.body, e.at, e.key
FROM json_each(?1) AS asked CROSS JOIN streams AS s ON s.stream = asked.value
CROSS JOIN entries AS e ON e.stream = s.stream AND e.n > s.last - ?2
ORDER BY e.stream, e.n;

-- name: extent
SELECT (SELECT min(n) FROM entries WHERE stream = ?1), (SELECT last FROM streams WHERE stream = ?1);

-- name: cursors
SELECT reader, n FROM cursors WHERE stream = ?;

-- name: standing
SELECT coalesce((SELECT last FROM streams WHERE stream = ?1), 0),
       (SELECT n FROM cursors WHERE stream = ?1 AND reader = ?2);

-- name: marks
SELECT mark, n, ms FROM marks WHERE mark >= ?1 AND mark < ?1 || char(1114111) ORDER BY ms DESC LIMIT 100000;

-- name: bucket
SELECT name, body FROM items WHERE bucket = ? ORDER BY name;

-- name: refusals
SELECT scope, id, word, reason, at FROM refusals ORDER BY n DESC LIMIT ?;

-- name: refusals_of
SELECT scope, id, word, reason, at FROM refusals WHERE scope = ? AND id = ? ORDER BY n DESC LIMIT ?;

-- name: size
SELECT (SELECT count(*) FROM messages), (SELECT count(*) FROM deliveries),
       (SELECT page_count FROM pragma_page_count()) * (SELECT page_size FROM pragma_page_size());

-- name: describe
SELECT 'SQLite ' || sqlite_version(), user_version FROM pragma_user_version;

-- ── forgetting ──

-- name: forget_ended_deliveries
-- As a JSON array of [key in hex, channel, recipient, round].
DELETE FROM deliveries WHERE state >= 10 AND (key, channel, recipient, round) IN (
    SELECT unhex(value ->> 0), value ->> 1, value ->> 2, value ->> 3 FROM json_each(?)
)
RETURNING 1;

-- name: set_floor
UPDATE floor SET until = ?, trusted = ?, claim = ?, mended = ?, barrier = ?, restored = ?;

-- name: hold_floor
-- The same; the writer's transaction keeps everything else out.
SELECT until, trusted, claim, mended, barrier, restored FROM floor;

-- name: forget_deliveries
-- Keys as a JSON array of hex.
DELETE FROM deliveries WHERE key IN (SELECT unhex(value) FROM json_each(?));

-- name: forget
DELETE FROM messages WHERE key IN (SELECT unhex(value) FROM json_each(?));

-- name: trim
DELETE FROM entries WHERE stream = ? AND n <= ?;

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
