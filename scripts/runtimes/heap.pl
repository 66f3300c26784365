% Lists, and facts that are asserted and counted.
:- initialization(main).

fill(I) :- atom_number(Atom, I), assertz(fact(I, Atom)).

main :-
    numlist(1, 400000, List),
    foldl([X, A, B]>>(B is (A * 31 + X) mod 1000003), List, 0, Sum),
    forall(between(1, 200000, I), fill(I)),
    garbage_collect,
    aggregate_all(count, (fact(_, Atom), atom_length(Atom, Length), Length > 5), Count),
    writeln(Sum), writeln(Count),
    halt.
