-- Messages that are listed by their kind, in the order of their acceptance: their ids may carry no time.
-- The index holds no others, so they cost nothing more.
ALTER TABLE messages ADD COLUMN listed INTEGER NOT NULL DEFAULT 0;
UPDATE messages SET listed = 1 WHERE kind = 'alert_event';
DROP INDEX messages_alerts;
CREATE INDEX messages_listed ON messages (kind, accepted_at, key) WHERE listed = 1;
