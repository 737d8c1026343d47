-- Alerts are listed as they came in; their ids carry no time. Other messages are not in this index.
CREATE INDEX duly_messages_alerts ON duly_messages (accepted_at, key) WHERE kind = 'alert_event';
