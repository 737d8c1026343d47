-- Statements of a flush in a file that several processes write. `:rows` stands for many rows of values.
-- Rows of nulls fill a statement up, and mean nothing.
-- CROSS JOIN: SQLite looks each asked key up, and never walks over the table instead.

-- name: messages
SELECT m.key, m.fingerprint, m.state, m.answer
FROM (VALUES :rows) AS v CROSS JOIN messages AS m ON m.key = v.column1;

-- name: deliveries
SELECT d.key, d.channel, d.recipient, d.round, d.state, d.attempt, d.due, d.expires, d.worker, d.error, d.kind,
       d.in_doubt
FROM (VALUES :rows) AS v CROSS JOIN deliveries AS d
    ON d.key = v.column1 AND d.channel = v.column2 AND d.recipient = v.column3 AND d.round = v.column4;

-- name: streams
SELECT s.stream, s.last FROM (VALUES :rows) AS v CROSS JOIN streams AS s ON s.stream = v.column1;

-- name: cursors
SELECT c.stream, c.reader, c.n
FROM (VALUES :rows) AS v CROSS JOIN cursors AS c ON c.stream = v.column1 AND c.reader = v.column2;

-- name: entries
SELECT e.stream, e.n, e.body
FROM (VALUES :rows) AS v CROSS JOIN entries AS e ON e.stream = v.column1 AND e.n = v.column2;

-- name: marks
SELECT m.mark, m.n, m.ms FROM (VALUES :rows) AS v CROSS JOIN marks AS m ON m.mark = v.column1;

-- name: items
SELECT i.bucket, i.name, i.body
FROM (VALUES :rows) AS v CROSS JOIN items AS i ON i.bucket = v.column1 AND i.name = v.column2;

-- name: put_messages
INSERT INTO messages
    (key, fingerprint, kind, recipient, state, until, accepted_at, moved_at, time, expires, position, body, listed,
     answer)
SELECT * FROM (VALUES :rows) WHERE column1 IS NOT NULL;

-- name: move_messages
UPDATE messages SET state = v.column2, answer = v.column3, moved_at = v.column4
FROM (VALUES :rows) AS v WHERE messages.key = v.column1;

-- name: drop_messages
DELETE FROM messages WHERE key IN (VALUES :rows);

-- name: drop_deliveries
DELETE FROM deliveries WHERE key IN (VALUES :rows);

-- name: discard_deliveries
DELETE FROM deliveries WHERE (key, channel, recipient, round) IN (VALUES :rows);

-- name: put_deliveries
INSERT OR REPLACE INTO deliveries
    (key, channel, recipient, round, kind, state, attempt, due, expires, worker, error, in_doubt)
SELECT * FROM (VALUES :rows) WHERE column1 IS NOT NULL;

-- name: put_streams
INSERT OR REPLACE INTO streams (stream, last)
SELECT * FROM (VALUES :rows) WHERE column1 IS NOT NULL;

-- name: put_entries
INSERT INTO entries (stream, n, body, at, key)
SELECT * FROM (VALUES :rows) WHERE column1 IS NOT NULL;

-- name: rewrite_entries
UPDATE entries SET body = v.column3
FROM (VALUES :rows) AS v WHERE entries.stream = v.column1 AND entries.n = v.column2;

-- name: put_cursors
INSERT OR REPLACE INTO cursors (stream, reader, n)
SELECT * FROM (VALUES :rows) WHERE column1 IS NOT NULL;

-- name: put_marks
INSERT OR REPLACE INTO marks (mark, n, ms)
SELECT * FROM (VALUES :rows) WHERE column1 IS NOT NULL;

-- name: put_items
INSERT OR REPLACE INTO items (bucket, name, body)
SELECT * FROM (VALUES :rows) WHERE column1 IS NOT NULL;

-- name: drop_items
DELETE FROM items WHERE (bucket, name) IN (VALUES :rows);

-- name: put_refusals
INSERT INTO refusals (scope, id, word, reason, at)
SELECT * FROM (VALUES :rows) WHERE column1 IS NOT NULL;

-- name: settled
-- Of the awaited messages (a JSON array of hex), those that have ended or are gone.
SELECT unhex(awaited.value) FROM json_each(?) AS awaited
LEFT JOIN messages AS m ON m.key = unhex(awaited.value)
WHERE m.key IS NULL OR m.state >= 10;
