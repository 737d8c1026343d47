-- What one hub has booked for a recipient at another: found by recipient, as soon as that hub is told to look.
-- Most deliveries are born under way and never get into it.
CREATE INDEX duly_deliveries_booked ON duly_deliveries (channel, recipient) WHERE state = 0;
