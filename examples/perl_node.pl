#!/usr/bin/env perl
# A node in Perl: perl_node.pl HOST PORT NAME PASSWORD STORE
#
# It needs Perl alone, and nothing of duly. The file STORE/node.jsonl is its memory. Its action `count` adds one to a
# number; `relay` sends `count` to the node that `to` of its payload names. Put your own actions into %actions.
#
#     duly conform node mqtt://127.0.0.1:1883 --run 'perl examples/perl_node.pl {host} {port} {name} {token} {store}'
use strict;
use warnings;
use IO::Handle;
use IO::Select;
use IO::Socket::INET;
use JSON::PP;
use MIME::Base64;
use Time::HiRes qw(time sleep);

my ($host, $port, $me, $password, $store) = @ARGV;
my $json = JSON::PP->new->utf8->canonical->allow_nonref;
my %actions = (count => sub { my ($state) = @_; return {count => ++$state->{count}} });
my %old_names = (
    sender => 'sender_client_id', receiver => 'receiver_client_id', msg_id => 'message_id',
    time => 'timestamp', exp => 'expiration',
);
my ($day, $skew, $heartbeat) = (86_400, 5, 60);
$SIG{PIPE} = 'IGNORE';

# -- memory: a journal of changes, flushed before anything is said of them --------------------------------------

my (%known, %sent);               # tasks that came, by sender and id; tasks of our own, by id
my $state = {count => 0};         # what actions keep
my ($file, $journal) = ("$store/node.jsonl");
if (open my $before, '<:raw', $file) {
    while (my $line = <$before>) {
        my $change = eval { $json->decode($line) } or next;    # a line that a power cut has torn
        apply($change);
    }
}
forget();
open $journal, '>:raw', "$file.new" or die "$file: $!";        # a new journal, without what is over
store({key => $_, set => $known{$_}}) for keys %known;
store({sent => 1, key => $_, set => $sent{$_}}) for keys %sent;
store({key => '', set => {until => 9e9}, state => $state});
rename "$file.new", $file or die "$file: $!";

sub apply {
    my ($change) = @_;
    my $tasks = $change->{sent} ? \%sent : \%known;
    $tasks->{$change->{key}} = {%{$tasks->{$change->{key}} // {}}, %{$change->{set}}};
    $state = $change->{state} if $change->{state};
}

sub store {
    my ($change) = @_;
    apply($change);
    print {$journal} $json->encode($change), "\n";
    $journal->flush && $journal->sync or die "the memory cannot be written: $!";
}

# What has expired is refused by its time, so its id need not be known any more.
sub forget {
    my $now = time;
    delete @known{grep { $known{$_}{until} < $now - $day } keys %known};
    delete @sent{grep { $sent{$_}{task}{exp} < $now - $day } keys %sent};
}

# -- MQTT 3.1.1 ---------------------------------------------------------------------------------------------------

my ($socket, $buffer, $session, $spoke, $packet_id) = (undef, '', '', 0, 0);

sub text { return pack 'n/a*', $_[0] }

sub write_packet {
    my ($head, $body) = @_;
    my ($left, $size) = (length $body, '');
    do { $size .= chr($left % 128 + ($left > 127 ? 128 : 0)); $left = int($left / 128) } while $left;
    my $packet = chr($head) . $size . $body;
    $spoke = time;
    while (length $packet) {
        my $done = syswrite $socket, $packet or die "cut\n";
        substr $packet, 0, $done, '';
    }
}

sub publish {
    my ($user, $kind, $message) = @_;
    $packet_id = $packet_id % 65_535 + 1;
    write_packet($kind eq 'status' ? 0x33 : 0x32,
        text("nodes/$user/$kind") . pack('n', $packet_id) . $json->encode($message));
}

sub status {
    my ($online) = @_;
    return {time => int time, online => $online ? JSON::PP::true : JSON::PP::false, session => $session,
        heartbeat => $heartbeat};
}

sub log_in {
    $socket = IO::Socket::INET->new(PeerAddr => $host, PeerPort => $port, Timeout => 5) or die "cut\n";
    setsockopt $socket, 6, 1, 1;    # TCP_NODELAY
    ($buffer, $session) = ('', sprintf '%d-%d', $$, time * 1_000_000);
    # name, password, a retained will with QoS 1; the session is kept
    write_packet(0x10, text('MQTT') . pack('CCn', 4, 0xEC, 60) . text($me) . text("nodes/$me/status")
        . text($json->encode(status(0))) . text($me) . text($password));
}

# The next whole packet in the buffer: its first byte and its body.
sub next_packet {
    my ($size, $at) = (0, 1);
    while (1) {
        return if $at >= length $buffer;
        my $digit = ord substr $buffer, $at, 1;
        $size += ($digit & 127) * 128**($at++ - 1);
        last if $digit < 128;
        die "cut\n" if $at > 4;
    }
    return if length $buffer < $at + $size;
    my $packet = substr $buffer, 0, $at + $size, '';
    return (ord $packet, substr $packet, $at);
}

# -- contents: base64 of JSON or text, or JSON itself; an answer is written as its task was -----------------------

sub read_content {
    my ($raw, $enc) = @_;
    return ($raw, 'json') if !defined $raw || ref $raw || ($enc // '') eq 'json';
    return ($raw, 'json') unless $raw =~ m{^(?:[\w+/]{4})*(?:[\w+/]{2}==|[\w+/]{3}=)?$}a && $raw !~ /_/;
    my $bytes = decode_base64($raw);
    my $value = eval { $json->decode($bytes) };
    return ($@ ? $bytes : $value, 'base64');
}

sub write_content { return $_[1] eq 'json' ? $_[0] : encode_base64($json->encode($_[0]), '') }

# -- tasks that come ----------------------------------------------------------------------------------------------

sub on_pending {
    my ($message) = @_;
    return unless ref $message eq 'HASH';
    my $id = defined $message->{msg_id} ? 'msg_id' : 'message_id';    # answered with the same name
    my %task = map { $_ => $message->{$_} // $message->{$old_names{$_}} } keys %old_names;
    for (@task{qw(sender msg_id)}) { return if !defined || ref || !length }
    return if $task{sender} =~ m{[/+#\0]};
    return if length($task{receiver} // '') && $task{receiver} ne $me;                  # minds-the-receiver
    for (@task{qw(time exp)}) { $_ //= 0; return unless /^\d+(\.\d+)?$/ }
    return if $task{exp} ? $task{exp} < time - $skew : abs(time - $task{time}) > $day;   # expiry, old tasks
    my ($payload, $form) = read_content($message->{payload}, $message->{enc});
    my ($key, $content) = map { $json->encode($_) } [@task{qw(sender msg_id)}], [$message->{action}, $payload];
    my $first = $known{$key};
    return if $first && $first->{content} ne $content;                                   # refuses-conflicts
    my %from = (to => $task{sender}, id => $id, msg_id => $task{msg_id}, form => $form);
    store({key => $key, set => {content => $content, until => $task{exp} || time + $day, from => \%from}})
        unless $first;                                                                   # runs-once-over-kills
    publish($task{sender}, 'ack', {$id => $task{msg_id}});                               # confirms-receipt
    if ($first) {
        publish($task{sender}, @$first{qw(kind answer)}) if $first->{kind};              # repeats-the-answer
        return;
    }
    my $action = $message->{action} // '';
    if (my $run = $actions{$action}) {
        my $value = $run->($state, $payload);
        end_task($key, 'complete', $value);
    } elsif ($action eq 'relay' && ref $payload eq 'HASH' && defined $payload->{to}) {
        send_task($payload->{to}, 'count', {}, $key);
    } else {
        end_task($key, 'failed', {code => 7, detail => "$me does not know $action"});
    }
}

sub end_task {
    my ($key, $kind, $value) = @_;
    my $from = $known{$key}{from};
    my %answer = ($from->{id} => $from->{msg_id});
    $answer{$kind eq 'complete' ? 'value' : 'error'} = write_content($value, $from->{form});
    store({key => $key, set => {kind => $kind, answer => \%answer}, state => $state});   # before it is said
    publish($from->{to}, $kind, \%answer);
}

# -- tasks of our own ---------------------------------------------------------------------------------------------

sub send_task {
    my ($to, $action, $payload, $for) = @_;
    my $id = sprintf '%s-%d-%d', $me, time * 1_000_000, scalar keys %sent;
    my %task = (sender => $me, receiver => $to, msg_id => $id, action => $action, time => int time,
        exp => 60 + int time, payload => encode_base64($json->encode($payload), ''), enc => 'base64');
    store({sent => 1, key => $id, set => {task => \%task, for => $for}});
    resend();
}

# Until it is answered or has expired: after 5 s, 10 s, 20 s …
sub resend {
    for my $own (grep { !$_->{ended} && !$_->{received} } values %sent) {
        next if $own->{task}{exp} < time || ($own->{next} // 0) > time;
        $own->{pause} = 2 * ($own->{pause} // 2.5);
        $own->{next} = time + $own->{pause};
        publish($own->{task}{receiver}, 'pending', $own->{task});
    }
}

sub on_answer {
    my ($kind, $message) = @_;
    return unless ref $message eq 'HASH';
    my $id = $message->{msg_id} // $message->{message_id};
    my $own = defined $id && !ref $id ? $sent{$id} : undef;
    return if !$own || $own->{ended};                                                    # takes-the-first-end
    if ($kind eq 'ack') { $own->{received} = 1; return }
    my ($value) = read_content($message->{value}, $message->{enc});
    store({sent => 1, key => $id, set => {ended => $kind}});
    end_task($own->{for}, 'complete', $kind eq 'complete' ? {state => 'done', value => $value} : {state => 'failed'});
}

# -- what arrives -------------------------------------------------------------------------------------------------

sub on_packet {
    my ($head, $body) = @_;
    if ($head >> 4 == 2) {                                                               # CONNACK
        die "the broker does not let $me in\n" if ord substr $body, 1, 1;
        write_packet(0x82, pack('n', 1) . join '', map { text("nodes/$me/$_") . "\1" } qw(pending ack complete failed status));
        publish($me, 'status', status(1));
        $_->{next} = 0 for values %sent;
        resend();
    } elsif ($head >> 4 == 3) {                                                          # PUBLISH
        my ($topic, $rest) = unpack 'n/a* a*', $body;
        my $number = $head & 6 ? substr $rest, 0, 2, '' : '';
        my $message = eval { $json->decode($rest) };
        my ($kind) = $topic =~ m{^nodes/\Q$me\E/(\w+)$};
        if (!defined $kind) { }
        elsif ($kind eq 'pending') { on_pending($message) }
        elsif ($kind eq 'status') {                                                      # an old will that came late
            publish($me, 'status', status(1)) if ref $message eq 'HASH' && ($message->{session} // '') ne $session;
        } else { on_answer($kind, $message) }
        write_packet(0x40, $number) if length $number;                                   # PUBACK: it is stored
    }
}

sub serve {
    log_in();
    my ($select, $heard, $reported) = (IO::Select->new($socket), time, time);
    while (1) {
        if ($select->can_read(0.5)) {
            sysread $socket, $buffer, 65_536, length $buffer or die "cut\n";
            $heard = time;
            while (my @packet = next_packet()) { on_packet(@packet) }
        }
        die "cut\n" if time - $heard > 90;
        write_packet(0xC0, '') if time - $spoke > 20;                                    # PINGREQ
        if (time - $reported > $heartbeat) { publish($me, 'status', status(1)); $reported = time; forget() }
        resend();
    }
}

while (1) {
    eval { serve() };
    warn $@ unless $@ eq "cut\n";
    close $socket if $socket;
    sleep 0.3;
}
