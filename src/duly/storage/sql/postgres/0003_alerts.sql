-- Alerts are listed as they came in; their ids carry no time. Nobody else pays for it.
CREATE INDEX duly_messages_alerts ON duly_messages (accepted_at, key) WHERE kind = 'alert_event';
