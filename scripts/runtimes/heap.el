; A hash table is filled, collected and read.
(let ((table (make-hash-table :test 'equal)) (sum 0))
  (dotimes (i 200000) (puthash (format "k%d" i) (list i (make-string 20 ?x)) table))
  (dotimes (_ 3)
    (garbage-collect)
    (maphash (lambda (key entry) (setq sum (mod (+ (* sum 31) (car entry) (length key)) 1000003))) table)
    (princ (format "%d\n" sum))))
