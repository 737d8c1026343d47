-- What was committed and is not in the tables yet: one row for a flush, see duly.storage.sqlite.journal.
CREATE TABLE journal (
    n    INTEGER PRIMARY KEY,
    body BLOB NOT NULL
);
