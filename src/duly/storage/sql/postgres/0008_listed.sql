-- Messages that are listed by their kind, in the order of their acceptance: their ids may carry no time.
-- The index holds no others, so they cost nothing more.
ALTER TABLE duly_messages ADD COLUMN listed BOOLEAN NOT NULL DEFAULT false;
UPDATE duly_messages SET listed = true WHERE kind = 'alert_event';
DROP INDEX duly_messages_alerts;
CREATE INDEX duly_messages_listed ON duly_messages (kind, accepted_at, key) WHERE listed;
