-- Alerts are listed as they came in; their ids carry no time. Other messages are not in this index.
CREATE INDEX messages_alerts ON messages (accepted_at, key) WHERE kind = 'alert_event';
