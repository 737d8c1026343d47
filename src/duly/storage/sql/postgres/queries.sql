-- Every statement that locks rows locks them in the order of their keys: two hubs cannot wait for each other.

-- name: migrating
-- One process migrates at a time; the number is "duly" in ASCII.
SELECT pg_advisory_xact_lock(1685417081);

-- name: has_schema
SELECT to_regclass('duly_schema') IS NOT NULL;

-- name: create_schema
CREATE TABLE duly_schema (
    number     BIGINT PRIMARY KEY,
    name       TEXT NOT NULL,
    applied_at TIMESTAMPTZ NOT NULL DEFAULT now()
);

-- name: version
SELECT coalesce(max(number), 0) FROM duly_schema;

-- name: migrated
INSERT INTO duly_schema (number, name) VALUES ($1, $2);

-- name: own_backend
-- The server process behind this connection.
SELECT pid, backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid();

-- name: end_backend
-- End a server process, if it is still that one; no row when it is gone.
SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = $1 AND backend_start = $2;

-- name: flush
-- A flush of rows that are as expected; see the migration that makes this function.
SELECT duly_flush($1, $2, $3, $4, $5, $6, $7);

-- name: admit
-- Insert what is absent. What is being inserted by another hub is waited for.
INSERT INTO duly_messages
    (key, fingerprint, kind, recipient, state, until, accepted_at, moved_at, time, expires, position, body, listed)
SELECT * FROM unnest(
    $1::bytea[], $2::bytea[], $3::text[], $4::text[], $5::smallint[], $6::bigint[], $7::bigint[], $8::bigint[],
    $9::bigint[], $10::bigint[], $11::bytea[], $12::bytea[], $13::boolean[]
)
ON CONFLICT DO NOTHING RETURNING key;

-- name: known
-- What a repeat needs to be told.
SELECT key, fingerprint, state, answer FROM duly_messages WHERE key = ANY($1::bytea[]);

-- name: hold
-- The same, of messages that may be moved.
SELECT key, fingerprint, state, answer FROM duly_messages WHERE key = ANY($1::bytea[])
ORDER BY key FOR UPDATE;

-- name: move
UPDATE duly_messages AS m SET state = new.state, answer = new.answer, moved_at = new.moved_at
FROM unnest($1::bytea[], $2::smallint[], $3::bytea[], $4::bigint[]) AS new (key, state, answer, moved_at)
WHERE m.key = new.key;

-- name: forget
DELETE FROM duly_messages WHERE key = ANY($1::bytea[]);

-- name: forget_deliveries
DELETE FROM duly_deliveries WHERE key = ANY($1::bytea[]);

-- name: find
SELECT key, kind, recipient, body, time, expires, position, state, answer, until, accepted_at, moved_at
FROM duly_messages WHERE key = $1;

-- name: find_all
SELECT key, kind, recipient, body, time, expires, position, state, answer, until, accepted_at, moved_at
FROM duly_messages WHERE key = ANY($1::bytea[]);

-- name: key_below
-- Where a look at so many messages ends.
SELECT key FROM duly_messages WHERE key < $1 ORDER BY key DESC LIMIT 1 OFFSET $2;

-- name: between
SELECT key, kind, recipient, body, time, expires, position, state, answer, until, accepted_at, moved_at
FROM duly_messages
WHERE key >= $1 AND key < $2
    AND ($3::bytea IS NULL OR substring(key FROM 7 FOR length($3::bytea)) = $3::bytea)
    AND ($4::bytea IS NULL OR substring(key FROM length(key) - length($4::bytea) + 1) = $4::bytea)
    AND ($5::text IS NULL OR recipient = $5::text) AND ($6::text IS NULL OR kind = $6::text)
    AND ($7::integer = 0 OR ($7::integer >> state) & 1 = 1)
    AND accepted_at >= $8 AND accepted_at < $9
ORDER BY key DESC LIMIT $10;

-- name: untimed_between
-- Messages whose ids have no time, by when they were accepted.
SELECT key, kind, recipient, body, time, expires, position, state, answer, until, accepted_at, moved_at
FROM duly_messages
WHERE key < '\x000000000001'::bytea
    AND (accepted_at / 1000, key) >= ($1::bigint, $2::bytea)
    AND (accepted_at / 1000, key) < ($3::bigint, $4::bytea)
    AND ($5::bytea IS NULL OR substring(key FROM 7 FOR length($5::bytea)) = $5::bytea)
    AND ($6::bytea IS NULL OR substring(key FROM length(key) - length($6::bytea) + 1) = $6::bytea)
    AND ($7::text IS NULL OR recipient = $7::text) AND ($8::text IS NULL OR kind = $8::text)
    AND ($9::integer = 0 OR ($9::integer >> state) & 1 = 1)
    AND accepted_at >= $10 AND accepted_at < $11
ORDER BY accepted_at / 1000 DESC, key DESC LIMIT $12;

-- name: of_kind
-- Listed messages of a kind, the newest first.
SELECT key, kind, recipient, body, time, expires, position, state, answer, until, accepted_at, moved_at
FROM duly_messages WHERE kind = $1 AND listed AND (accepted_at, key) < ($2, $3::bytea)
ORDER BY accepted_at DESC, key DESC LIMIT $4;

-- name: aged
-- Up to so many listed messages, however many deliveries they have.
SELECT m.accepted_at, m.key,
       d.key, d.channel, d.recipient, d.round, d.state, d.attempt, d.due, d.expires, d.worker, d.error,
       d.kind, d.in_doubt
FROM (
    SELECT accepted_at, key, state FROM duly_messages
    WHERE kind = $1 AND listed AND (accepted_at, key) > ($2, $3::bytea) AND accepted_at < $4
    ORDER BY accepted_at, key LIMIT $5
) AS m LEFT JOIN duly_deliveries AS d ON d.key = m.key AND m.state >= 10 AND d.state >= 10
ORDER BY m.accepted_at, m.key, d.channel, d.recipient, d.round;

-- name: forget_ended_deliveries
DELETE FROM duly_deliveries AS d
USING unnest($1::bytea[], $2::text[], $3::text[], $4::bigint[]) AS old (key, channel, recipient, round)
WHERE d.key = old.key AND d.channel = old.channel AND d.recipient = old.recipient AND d.round = old.round
    AND d.state >= 10
RETURNING 1;

-- name: settled
-- Of the awaited messages, those that have ended or are gone.
SELECT awaited.key FROM unnest($1::bytea[]) AS awaited (key)
LEFT JOIN duly_messages AS m ON m.key = awaited.key
WHERE m.key IS NULL OR m.state >= 10;

-- name: hold_deliveries
SELECT d.key, d.channel, d.recipient, d.round, state, attempt, due, expires, worker, error, kind, in_doubt
FROM duly_deliveries AS d
JOIN unnest($1::bytea[], $2::text[], $3::text[], $4::bigint[]) AS asked (key, channel, recipient, round)
    ON d.key = asked.key AND d.channel = asked.channel AND d.recipient = asked.recipient AND d.round = asked.round
ORDER BY d.key, d.channel, d.recipient, d.round FOR UPDATE OF d;

-- name: hold_due
-- What others are claiming at this moment is passed over, not waited for.
SELECT key, channel, recipient, round, state, attempt, due, expires, worker, error, kind, in_doubt
FROM duly_deliveries
WHERE channel = $1 AND state < 10 AND due <= $2 ORDER BY due, key, recipient, round LIMIT $3
FOR UPDATE SKIP LOCKED;

-- name: deliver
INSERT INTO duly_deliveries
    (key, channel, recipient, round, state, attempt, due, expires, worker, error, kind, in_doubt)
SELECT * FROM unnest(
    $1::bytea[], $2::text[], $3::text[], $4::bigint[], $5::smallint[], $6::bigint[], $7::bigint[], $8::bigint[],
    $9::text[], $10::text[], $11::smallint[], $12::boolean[]
)
ON CONFLICT DO NOTHING RETURNING 1;

-- name: change_deliveries
UPDATE duly_deliveries AS d
SET state = new.state, attempt = new.attempt, due = new.due, worker = new.worker, error = new.error,
    in_doubt = new.in_doubt
FROM unnest(
    $1::bytea[], $2::text[], $3::text[], $4::bigint[], $5::smallint[], $6::bigint[], $7::bigint[], $8::bigint[],
    $9::text[], $10::text[], $11::smallint[], $12::boolean[]
) AS new (key, channel, recipient, round, state, attempt, due, expires, worker, error, kind, in_doubt)
WHERE d.key = new.key AND d.channel = new.channel AND d.recipient = new.recipient AND d.round = new.round;

-- name: deliveries
SELECT key, channel, recipient, round, state, attempt, due, expires, worker, error, kind, in_doubt
FROM duly_deliveries
WHERE key = $1 ORDER BY channel, recipient, round;

-- name: deliveries_of_all
SELECT key, channel, recipient, round, state, attempt, due, expires, worker, error, kind, in_doubt
FROM duly_deliveries
WHERE key = ANY($1::bytea[]) ORDER BY key, channel, recipient, round;

-- name: open
-- What a restart goes on with.
SELECT m.key, m.kind, m.recipient, m.body, m.time, m.expires, m.position, m.state, m.accepted_at,
       d.key, d.channel, d.recipient, d.round, d.state, d.attempt, d.due, d.expires, d.worker, d.error,
       d.kind, d.in_doubt
FROM duly_deliveries AS d JOIN duly_messages AS m ON m.key = d.key
WHERE d.channel = $1 AND d.state < 10 ORDER BY m.accepted_at, m.key, d.recipient, d.round;

-- name: booked
SELECT m.key, m.kind, m.recipient, m.body, m.time, m.expires, m.position, m.state, m.accepted_at,
       d.key, d.channel, d.recipient, d.round, d.state, d.attempt, d.due, d.expires, d.worker, d.error,
       d.kind, d.in_doubt
FROM duly_deliveries AS d JOIN duly_messages AS m ON m.key = d.key
WHERE d.channel = $1 AND d.recipient = ANY($2::text[]) AND d.state = 0
ORDER BY m.accepted_at, m.key, d.recipient, d.round;

-- name: unheld
SELECT d.recipient, count(*), min(m.accepted_at)
FROM duly_deliveries AS d JOIN duly_messages AS m ON m.key = d.key
WHERE d.channel = $1 AND d.state = 0 AND d.worker = ''
GROUP BY d.recipient;

-- name: strays
-- For a recipient who is here, but held by another hub; held by a hub that is gone; expired and held by none.
SELECT m.key, m.kind, m.recipient, m.body, m.time, m.expires, m.position, m.state, m.accepted_at,
       d.key, d.channel, d.recipient, d.round, d.state, d.attempt, d.due, d.expires, d.worker, d.error,
       d.kind, d.in_doubt
FROM duly_deliveries AS d JOIN duly_messages AS m ON m.key = d.key
WHERE d.channel = $1 AND d.state < 10 AND (
    d.recipient = ANY($2::text[]) AND d.worker <> $3
    OR d.worker <> '' AND d.worker <> ALL($4::text[])
    OR d.worker = '' AND d.expires BETWEEN 1 AND $5
)
ORDER BY m.accepted_at, m.key, d.recipient, d.round;

-- name: hold_streams
SELECT stream, last FROM duly_streams WHERE stream = ANY($1::text[]) ORDER BY stream FOR UPDATE;

-- name: lasts
SELECT stream, last FROM duly_streams WHERE stream = ANY($1::text[]);

-- name: begin_streams
INSERT INTO duly_streams (stream, last) SELECT * FROM unnest($1::text[], $2::bigint[])
ON CONFLICT DO NOTHING RETURNING 1;

-- name: extend_streams
UPDATE duly_streams AS s SET last = new.last FROM unnest($1::text[], $2::bigint[]) AS new (stream, last)
WHERE s.stream = new.stream;

-- name: append
INSERT INTO duly_entries (stream, n, body, at, key)
SELECT * FROM unnest($1::text[], $2::bigint[], $3::bytea[], $4::bigint[], $5::bytea[]);

-- name: hold_entries
SELECT e.stream, e.n, e.body FROM duly_entries AS e
JOIN unnest($1::text[], $2::bigint[]) AS asked (stream, n) ON e.stream = asked.stream AND e.n = asked.n
ORDER BY e.stream, e.n FOR UPDATE OF e;

-- name: rewrite
UPDATE duly_entries AS e SET body = new.body
FROM unnest($1::text[], $2::bigint[], $3::bytea[]) AS new (stream, n, body)
WHERE e.stream = new.stream AND e.n = new.n;

-- name: entries
SELECT n, body, at, key FROM duly_entries WHERE stream = $1 AND n > $2 ORDER BY n LIMIT $3;

-- name: newest_entries
SELECT e.stream, e.n, e.body, e.at, e.key
FROM duly_streams AS s JOIN duly_entries AS e ON e.stream = s.stream AND e.n > s.last - $2::bigint
WHERE s.stream = ANY($1::text[]) ORDER BY e.stream, e.n;

-- name: entries_after
SELECT asked.place, e.n, e.body, e.at, e.key
FROM unnest($1::text[], $2::bigint[]) WITH ORDINALITY AS asked (stream, after, place)
CROSS JOIN LATERAL (
    SELECT n, body, at, key FROM duly_entries
    WHERE stream = asked.stream AND n > asked.after ORDER BY n LIMIT $3
) AS e
ORDER BY asked.place, e.n;

-- name: extent
SELECT (SELECT min(n) FROM duly_entries WHERE stream = $1), (SELECT last FROM duly_streams WHERE stream = $1);

-- name: trim
DELETE FROM duly_entries WHERE stream = $1 AND n <= $2;

-- name: hold_cursors
SELECT c.stream, c.reader, c.n FROM duly_cursors AS c
JOIN unnest($1::text[], $2::text[]) AS asked (stream, reader)
    ON c.stream = asked.stream AND c.reader = asked.reader
ORDER BY c.stream, c.reader FOR UPDATE OF c;

-- name: begin_cursors
INSERT INTO duly_cursors (stream, reader, n) SELECT * FROM unnest($1::text[], $2::text[], $3::bigint[])
ON CONFLICT DO NOTHING RETURNING 1;

-- name: move_cursors
UPDATE duly_cursors AS c SET n = new.n
FROM unnest($1::text[], $2::text[], $3::bigint[]) AS new (stream, reader, n)
WHERE c.stream = new.stream AND c.reader = new.reader;

-- name: cursor
SELECT n FROM duly_cursors WHERE stream = $1 AND reader = $2;

-- name: cursors
SELECT reader, n FROM duly_cursors WHERE stream = $1;

-- name: standing
SELECT coalesce(s.last, 0), c.n
FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS asked (stream, reader, place)
LEFT JOIN duly_streams AS s ON s.stream = asked.stream
LEFT JOIN duly_cursors AS c ON c.stream = asked.stream AND c.reader = asked.reader
ORDER BY asked.place;

-- name: hold_marks
SELECT mark, n, ms FROM duly_marks WHERE mark = ANY($1::text[]) ORDER BY mark FOR UPDATE;

-- name: begin_marks
INSERT INTO duly_marks (mark, n, ms) SELECT * FROM unnest($1::text[], $2::bigint[], $3::bigint[])
ON CONFLICT DO NOTHING RETURNING 1;

-- name: raise_marks
UPDATE duly_marks AS m SET n = new.n, ms = new.ms
FROM unnest($1::text[], $2::bigint[], $3::bigint[]) AS new (mark, n, ms)
WHERE m.mark = new.mark;

-- name: marks
SELECT mark, n, ms FROM duly_marks WHERE mark >= $1 AND mark < $1 || chr(1114111)
ORDER BY ms DESC LIMIT 100000;

-- name: hold_items
SELECT i.bucket, i.name, i.body FROM duly_items AS i
JOIN unnest($1::text[], $2::text[]) AS asked (bucket, name) ON i.bucket = asked.bucket AND i.name = asked.name
ORDER BY i.bucket, i.name FOR UPDATE OF i;

-- name: put_new
INSERT INTO duly_items (bucket, name, body) SELECT * FROM unnest($1::text[], $2::text[], $3::bytea[])
ON CONFLICT DO NOTHING RETURNING 1;

-- name: replace
UPDATE duly_items AS i SET body = new.body
FROM unnest($1::text[], $2::text[], $3::bytea[]) AS new (bucket, name, body)
WHERE i.bucket = new.bucket AND i.name = new.name;

-- name: drop
DELETE FROM duly_items AS i USING unnest($1::text[], $2::text[]) AS old (bucket, name)
WHERE i.bucket = old.bucket AND i.name = old.name;

-- name: bucket
SELECT name, body FROM duly_items WHERE bucket = $1 ORDER BY name;

-- name: item
SELECT body FROM duly_items WHERE bucket = $1 AND name = $2;

-- The items of these names, in the order asked; null: there is none.
-- name: items
SELECT i.body FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS asked (bucket, name, place)
LEFT JOIN duly_items AS i ON i.bucket = asked.bucket AND i.name = asked.name
ORDER BY asked.place;

-- How many items are in each of these buckets.
-- name: counts
SELECT bucket, count(*) FROM duly_items WHERE bucket = ANY($1::text[]) GROUP BY bucket;

-- name: refuse
INSERT INTO duly_refusals (scope, id, word, reason, at)
SELECT scope, id, word, reason, at
FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::bigint[])
    WITH ORDINALITY AS new (scope, id, word, reason, at, place)
ORDER BY place;

-- name: forget_refusals
DELETE FROM duly_refusals WHERE n IN (
    SELECT n FROM duly_refusals WHERE n <= (SELECT max(n) FROM duly_refusals) - $1::bigint
    ORDER BY n FOR UPDATE SKIP LOCKED
);

-- name: refusals
SELECT scope, id, word, reason, at FROM duly_refusals ORDER BY n DESC LIMIT $1;

-- name: refusals_of
SELECT scope, id, word, reason, at FROM duly_refusals WHERE scope = $1 AND id = $2 ORDER BY n DESC LIMIT $3;

-- name: floor
SELECT until, trusted, claim, mended, barrier, restored FROM duly_floor;

-- name: hold_floor
SELECT until, trusted, claim, mended, barrier, restored FROM duly_floor FOR UPDATE;

-- name: set_floor
UPDATE duly_floor SET until = $1, trusted = $2, claim = $3, mended = $4, barrier = $5, restored = $6;

-- name: prunable_keys
-- What is locked at this moment can wait for the next time.
SELECT key FROM duly_messages
WHERE until < 4611686018427387903 AND until <= $1 AND state >= 10 ORDER BY until LIMIT $2
FOR UPDATE SKIP LOCKED;

-- name: prunable
SELECT key, kind, recipient, body, time, expires, position, state, answer, until, accepted_at, moved_at
FROM duly_messages
WHERE until < 4611686018427387903 AND until <= $1 AND state >= 10 ORDER BY until, key LIMIT $2;

-- name: prunable_keys_of
SELECT key FROM duly_messages WHERE key = ANY($2::bytea[]) AND until <= $1 AND state >= 10
FOR UPDATE SKIP LOCKED;

-- name: size
SELECT (SELECT count(*) FROM duly_messages), (SELECT count(*) FROM duly_deliveries),
       (SELECT sum(pg_total_relation_size(name::regclass))::bigint FROM unnest(ARRAY[
           'duly_messages', 'duly_deliveries', 'duly_streams', 'duly_entries', 'duly_cursors', 'duly_marks',
           'duly_items', 'duly_refusals'
       ]) AS name);

-- name: scrub
-- Write the table anew: old versions of its rows are then nowhere in it.
VACUUM FULL duly_items;

-- What the ledger is made of.
-- name: describe
SELECT 'PostgreSQL ' || split_part(current_setting('server_version'), ' ', 1),
       (SELECT coalesce(max(number), 0) FROM duly_schema);

-- name: other_processes
-- Connections of other processes of duly to this database.
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND application_name = 'duly' AND pid <> pg_backend_pid();

-- name: invalid_indexes
-- Indexes of the ledger that the server does not use, since they are incomplete.
SELECT c.relname::text FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indexrelid
JOIN pg_class AS t ON t.oid = i.indrelid
WHERE starts_with(t.relname::text, 'duly_') AND t.relnamespace = current_schema()::regnamespace
    AND NOT (i.indisvalid AND i.indisready)
ORDER BY 1;
