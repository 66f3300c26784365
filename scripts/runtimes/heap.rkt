#lang racket/base
; A hash table is filled, read and collected.
(define table (make-hash))
(for ([i 400000]) (hash-set! table i (list i (number->string i))))
(for ([round 3])
  (collect-garbage)
  (displayln
   (for/fold ([sum 0]) ([i 400000])
     (define entry (hash-ref table i))
     (modulo (+ (* sum 31) (car entry) (string-length (cadr entry))) 1000000007))))
