"""The kinds of frames between a session's controller and its workers."""

# Commands, on a worker's command connection, in the order of their numbers.
CALL, SYNC, GET, STOP = 1, 2, 3, 4
# A CALL that is answered when it is done, as if a SYNC followed: one message less where the controller waits next.
CALL_AND_SYNC = 5
# Which call of an earlier epoch, by its number, was the first that the worker did not finish? 0 for none.
SETTLE = 6
# What a worker answers: to SYNC and GET, and once when it has started.
DONE, FAILED, SKIPPED, READY = 10, 11, 12, 13
# On the control connection, which threads of their own read, however busy the worker is.
# From the worker: it lives; a call of this number failed; where its main thread is.
BEAT, FAILURE, PLACE = 20, 21, 22
# To the worker: leave what belongs to this epoch, another worker failed; end a call that runs; say where you are.
# Or: the time limit is over; leave all collectives of this epoch, and do the other calls all the same.
RELEASE, CANCEL, WHERE, LEAVE = 30, 31, 32, 33
